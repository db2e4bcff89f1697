"""Exchanges between ranks, and the errors of lost ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_grpo.dist import collectives
from vlm_grpo.errors import UserError

TWO_RANKS: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
"""An accelerator of two ranks."""


def test_every_tensor_is_summed_in_its_bucket(monkeypatch):
    sent: list[torch.Tensor] = []

    def double(flat: torch.Tensor) -> None:  # the sum over two ranks with equal values
        sent.append(flat.clone())
        flat *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 40)  # ten float32
    tensors = [torch.randn(size) for size in ((2, 3), (4,), (1,), (30,), (2,))]
    tensors.append(torch.ones(3, dtype=torch.float64))
    before = [tensor.clone() for tensor in tensors]
    collectives.sum_over_ranks(TWO_RANKS, tensors)
    assert [len(flat) for flat in sent] == [10, 1, 30, 2, 3]
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, 2 * old)


@pytest.mark.parametrize(("own", "other"), [(True, False), (False, True), (False, False)])
def test_a_flag_of_any_rank_counts(monkeypatch, own, other):
    monkeypatch.setattr(collectives.utils, "reduce", lambda flags, _: flags + float(other))
    assert collectives.any_rank(TWO_RANKS, own) == (own or other)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms"),
        torch.distributed.DistBackendError("NCCL communicator was aborted"),
    ],
)
def test_the_error_of_a_lost_rank_is_explained(error):
    message = "another process of this run has died"
    with pytest.raises(UserError, match=message), collectives.explain_lost_rank():
        raise error
    with pytest.raises(RuntimeError, match="shapes"), collectives.explain_lost_rank():
        raise RuntimeError("shapes do not match")
