"""Weights that are gathered from several ranks."""

import torch

from vlm_grpo.dist.weights import gather_full


def test_gather_full_keeps_the_requested_names_and_ties():
    tensors = {**dict.fromkeys(("head", "embedding"), torch.ones(2)), "norm": torch.zeros(1)}
    gathered = gather_full(tensors, {"head", "embedding"})
    assert set(gathered) == {"head", "embedding"}
    assert gathered["head"] is gathered["embedding"]
