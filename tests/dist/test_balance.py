"""The balance of work between ranks, and the moves of whole groups that restore it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.dist.balance import balance_by_cost, balance_groups, plan_moves
from vlm_grpo.types import Example, Group, Prompt


def balance(
    monkeypatch: pytest.MonkeyPatch,
    groups: list[dict[int, Group]],
    moved: Sequence[int],
    mini_batches: int = 1,
) -> list[Any]:
    """Return the results of each rank, to which all costs and the moved groups are sent."""
    costs = [{i: len(g.completions[0].token_ids) for i, g in own.items()} for own in groups]
    parcels = [(i, g.completions, g.scores) for own in groups for i, g in own.items() if i in moved]

    def load(indices: Sequence[int]) -> list[Prompt]:
        return [Prompt(Example(f"loaded {i}", (), "?", 0), "", (7, 8), {}) for i in indices]

    results = []
    for rank, own in enumerate(groups):
        sent = iter([costs, parcels])
        monkeypatch.setattr("vlm_grpo.dist.balance.gather_object", lambda _, sent=sent: next(sent))
        ranks: Any = SimpleNamespace(process_index=rank, num_processes=1)
        results.append(balance_groups(own, costs[rank], load, ranks, mini_batches))
    return results


def make_groups(lengths: dict[int, int]) -> dict[int, Group]:
    return {i: make_group({"exact": i}, lengths=(length,)) for i, length in lengths.items()}


def test_groups_move_whole_to_the_rank_with_less_to_do(monkeypatch):
    groups = [make_groups({0: 10, 3: 6, 5: 9}), make_groups({1: 2, 4: 1})]
    # 25 and 3 tokens: moving 10 leaves 15 and 13, more even than moving 9 or exchanging 10 for 1.
    (first, parts), (second, _) = balance(monkeypatch, groups, moved=[0])
    assert parts == dict.fromkeys([0, 1, 3, 4, 5], 0)
    assert (list(first), list(second)) == ([3, 5], [0, 1, 4])
    moved, original = second[0], groups[0][0]
    assert (moved.completions, moved.scores) == (original.completions, original.scores)
    assert moved.id == "loaded 0"  # images are not sent
    assert first == {i: groups[0][i] for i in (3, 5)}


def test_each_mini_batch_is_balanced(monkeypatch):
    """The ranks' sums are equal at first, but each has one mini-batch to itself."""
    groups = [make_groups({0: 5, 1: 5}), make_groups({2: 5, 3: 5})]
    (first, parts), (second, same) = balance(monkeypatch, groups, [0, 2], mini_batches=2)
    assert parts == same == {0: 0, 1: 0, 2: 1, 3: 1}
    for own in (first, second):
        assert sorted(parts[index] for index in own) == [0, 1]


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
    by_prompts = balance_by_cost(prompts.tolist(), 8)
    shares = [{i: int(tokens[i]) for i in own} for own in by_prompts]
    moves = plan_moves(shares)
    kept = [sum(c for i, c in own.items() if i not in moves) for own in shares]
    after = [kept[r] + sum(int(tokens[i]) for i in moves if moves[i] == r) for r in range(8)]
    mean = tokens.sum() / 8
    assert max(sum(own.values()) for own in shares) > 1.3 * mean  # 1.35
    assert max(after) < 1.05 * mean  # 1.02
    assert len(moves) < 32 / 2  # a new distribution would move seven of eight


@given(costs=st.lists(st.integers(1, 5000), max_size=60), world_size=st.integers(1, 9))
def test_costs_are_balanced_over_ranks(costs, world_size):
    shares = balance_by_cost(costs, world_size)
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
    free = balance_by_cost([0] * 6, 3)  # by number
    assert [len(share) for share in free] == [2, 2, 2]
