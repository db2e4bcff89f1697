"""Exchanges between ranks, the balance of their work, and the errors of lost ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.dist import collectives
from vlm_grpo.errors import UserError
from vlm_grpo.training.balance import plan_moves

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


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 4)), max_size=40))
def test_moves_lower_the_highest_total(items):
    costs, homes = [cost for cost, _ in items], [home for _, home in items]
    shares = [{i: costs[i] for i, home in enumerate(homes) if home == rank} for rank in range(5)]
    moves = plan_moves(shares)
    owners = [moves.get(item, home) for item, home in enumerate(homes)]
    assert all(moves[item] != homes[item] for item in moves)
    before, after = (
        [sum(costs[i] for i, owner in enumerate(where) if owner == rank) for rank in range(5)]
        for where in (homes, owners)
    )
    assert max(after) < max(before) or not moves
    if max(after) > 1.02 * sum(costs) / 5:  # moving no item of the highest rank would help
        high = after.index(max(after))
        own = [costs[i] for i, owner in enumerate(owners) if owner == high and costs[i]]
        assert all(cost >= max(after) - min(after) for cost in own)


def test_few_moves_even_out_skewed_lengths():
    # Eight ranks with four groups each, shared out by their prompts. The completions' lengths are
    # log-normal (a few are ten times the median), and a third of the groups has no gradient.
    random = np.random.default_rng(0)
    prompts = random.integers(200, 1500, 32)
    tokens = prompts + np.minimum(random.lognormal(5.5, 1.0, (8, 32)), 2048).astype(int).sum(0)
    tokens[random.random(32) < 1 / 3] = 0
    by_prompts = collectives.balance_by_cost(prompts.tolist(), 8)
    shares = [{i: int(tokens[i]) for i in own} for own in by_prompts]
    moves = plan_moves(shares)
    kept = [sum(c for i, c in own.items() if i not in moves) for own in shares]
    after = [kept[r] + sum(int(tokens[i]) for i in moves if moves[i] == r) for r in range(8)]
    mean = tokens.sum() / 8
    assert max(sum(own.values()) for own in shares) > 1.3 * mean  # 1.35
    assert max(after) < 1.05 * mean  # 1.02
    assert len(moves) < 32 / 2  # a new distribution would move seven of eight


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


def test_gather_full_keeps_the_requested_names_and_ties():
    tensors = {**dict.fromkeys(("head", "embedding"), torch.ones(2)), "norm": torch.zeros(1)}
    gathered = collectives.gather_full(tensors, {"head", "embedding"})
    assert set(gathered) == {"head", "embedding"}
    assert gathered["head"] is gathered["embedding"]
