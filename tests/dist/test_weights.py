"""Weights that are gathered from several ranks."""

import torch

from vlm_grpo.dist import weights
from vlm_grpo.dist.weights import gather_full


def test_gather_full_keeps_the_requested_names_and_ties():
    tensors = {**dict.fromkeys(("head", "embedding"), torch.ones(2)), "norm": torch.zeros(1)}
    gathered = gather_full(tensors, {"head", "embedding"})
    assert set(gathered) == {"head", "embedding"}
    assert gathered["head"] is gathered["embedding"]


def test_a_shared_tensor_is_gathered_once_and_only_what_is_kept_is_copied(monkeypatch):
    gathered: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []

    class Whole(torch.Tensor):
        def cpu(self) -> torch.Tensor:
            copied.append(self)
            return self.as_subclass(torch.Tensor)

    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            gathered.append(self)
            return self.as_subclass(Whole)

    monkeypatch.setattr(weights, "DTensor", Sharded)
    shared, norm = torch.ones(2).as_subclass(Sharded), torch.zeros(1).as_subclass(Sharded)
    found = gather_full({"head": shared, "embedding": shared, "norm": norm}, {"head", "embedding"})
    assert len(gathered) == 2, "every rank takes part also for what it does not keep"
    assert len(copied) == 1
    assert found["head"] is found["embedding"]
    assert found["head"].tolist() == [1, 1]
