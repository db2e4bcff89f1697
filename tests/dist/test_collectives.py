"""Exchanges between ranks, the balance of their work, and the errors of lost ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.dist import collectives
from vlm_grpo.errors import UserError

TWO_RANKS: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
"""An accelerator of two ranks."""


def set_other_flag(monkeypatch: pytest.MonkeyPatch, flag: bool) -> None:
    """Let the other rank contribute a flag to every sum."""
    monkeypatch.setattr(collectives.utils, "reduce", lambda flags, _: flags + float(flag))


@given(costs=st.lists(st.integers(1, 5000), max_size=60), world_size=st.integers(1, 9))
def test_costs_are_balanced_over_ranks(costs, world_size):
    shares = collectives.balance_by_cost(costs, world_size)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    totals = [sum(costs[item] for item in share) for share in shares]
    # Graham 1969: the longest-processing-time rule is at most 4/3 of the optimum, which is at
    # least the mean and at least the most expensive item.
    bound = max([sum(costs) / world_size, *costs, 0])
    descending = sorted(costs, reverse=True)
    if len(costs) > world_size:  # two of the world_size + 1 most expensive items share a rank
        bound = max(bound, descending[world_size - 1] + descending[world_size])
    assert max(totals) <= 4 / 3 * bound + 1e-9
    if len(costs) >= world_size:
        assert all(shares)
    free = collectives.balance_by_cost([0] * 6, 3)  # by number
    assert [len(share) for share in free] == [2, 2, 2]


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
    set_other_flag(monkeypatch, other)
    assert collectives.any_rank(TWO_RANKS, own) == (own or other)


def test_a_failure_on_one_rank_is_raised_on_all(monkeypatch):
    set_other_flag(monkeypatch, False)
    with collectives.fail_together(TWO_RANKS):
        pass
    set_other_flag(monkeypatch, True)
    message = "another process of this run has failed"
    with pytest.raises(UserError, match=message), collectives.fail_together(TWO_RANKS):
        pass
    # A rank that fails itself raises its own error.
    with pytest.raises(OSError, match="disk"), collectives.fail_together(TWO_RANKS):
        raise OSError("disk")


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
