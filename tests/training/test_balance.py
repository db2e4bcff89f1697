"""Groups move between ranks whole, at the cost of the passes that they still need."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from groups import make_group, truncate

from vlm_grpo.dist import collectives
from vlm_grpo.errors import UserError
from vlm_grpo.training import balance
from vlm_grpo.training.balance import balance_groups, estimate_cost
from vlm_grpo.types import Example, Group, Prompt

REFERENCE = {"beta": 0.1, "reference_refresh_every": "never"}


@pytest.mark.parametrize(
    ("rewards", "objective", "shared", "cost"),
    [
        # A prompt of 2 tokens, completions of 3 and 5 that feed 2 and 4: 8 tokens, forward and
        # backward (3 passes).
        ((0, 1), {}, True, 3 * 8),
        ((0, 1), {"num_iterations": 2}, True, 6 * 8),
        ((0, 1), {}, False, 3 * 10),  # the prompt twice
        ((1, 1), {}, True, 0),  # no gradient
        ((1, 1), {"entropy_coef": 0.1}, True, 3 * 8),
        ((1, 1), REFERENCE, True, 4 * 8),  # the KL penalty has a gradient
        ((1, 1), {**REFERENCE, "kl_in": "reward"}, True, 5 * 8),  # it makes the rewards differ
        ((0, 1), {"mask_truncated_completions": True}, True, 3 * 4),
    ],
)
def test_a_group_costs_the_passes_that_it_needs(settings, rewards, objective, shared, cost):
    group = truncate(make_group(*({"exact": r} for r in rewards), lengths=(3, 5)), row=1)
    assert estimate_cost(group, {"exact": 1.0}, settings(objective=objective), shared) == cost


class Exchange:
    """A ``gather_object`` and ``any_rank`` between threads, one for each rank."""

    def __init__(self, world_size: int) -> None:
        self.barrier, self.items = threading.Barrier(world_size, timeout=20), [[]] * world_size

    def gather(self, items: list[Any]) -> list[Any]:
        self.items[int(threading.current_thread().name)] = items
        self.barrier.wait()
        found = [item for part in self.items for item in part]
        self.barrier.wait()
        return found

    def any_rank(self, ranks: Any, flag: bool) -> bool:
        return any(self.gather([flag]))


def run_ranks(
    monkeypatch: pytest.MonkeyPatch,
    groups: list[dict[int, Group]],
    broken: int = -1,
    mini_batches: int = 1,
) -> list[Any]:
    """Run ``balance_groups`` in one thread per rank; return the results or errors."""
    exchange = Exchange(len(groups))
    results: list[Any] = [None] * len(groups)
    monkeypatch.setattr(balance, "gather_object", exchange.gather)
    monkeypatch.setattr(collectives, "any_rank", exchange.any_rank)

    def load(indices: Sequence[int]) -> list[Prompt]:
        if broken in indices:
            raise UserError("image 3.png cannot be read")
        return [Prompt(Example(f"loaded {i}", (), "?", 0), "", (7, 8), {}) for i in indices]

    def run(rank: int) -> None:
        ranks: Any = SimpleNamespace(process_index=rank, num_processes=len(groups))
        costs = {i: len(group.completions[0].token_ids) for i, group in groups[rank].items()}
        try:
            results[rank] = balance_groups(groups[rank], costs, load, ranks, mini_batches)
        except UserError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make_groups(lengths: dict[int, int]) -> dict[int, Group]:
    return {i: make_group({"exact": i}, lengths=(length,)) for i, length in lengths.items()}


def test_groups_move_whole_to_the_rank_with_less_to_do(monkeypatch):
    groups = [make_groups({0: 10, 3: 6, 5: 9}), make_groups({1: 2, 4: 1})]
    # 25 and 3 tokens: moving 10 leaves 15 and 13, more even than moving 9 or exchanging 10 for 1.
    (first, none, parts), (second, received, _) = run_ranks(monkeypatch, groups)
    assert parts == dict.fromkeys([0, 1, 3, 4, 5], 0)
    assert (none, received) == ((), (0,))
    assert (list(first), list(second)) == ([3, 5], [0, 1, 4])
    moved, original = second[0], groups[0][0]
    assert (moved.completions, moved.scores) == (original.completions, original.scores)
    assert moved.id == "loaded 0"  # images are not sent
    assert first == {i: groups[0][i] for i in (3, 5)}


def test_even_groups_stay(monkeypatch):
    groups = [make_groups({0: 10, 3: 6}), make_groups({1: 8, 4: 8})]
    parts = dict.fromkeys([0, 1, 3, 4], 0)
    assert run_ranks(monkeypatch, groups) == [(groups[0], (), parts), (groups[1], (), parts)]


def test_each_mini_batch_is_balanced(monkeypatch):
    """The ranks' sums are equal at first, but each has one mini-batch to itself."""
    groups = [make_groups({0: 5, 1: 5}), make_groups({2: 5, 3: 5})]
    (first, _, parts), (second, _, same) = run_ranks(monkeypatch, groups, mini_batches=2)
    assert parts == same == {0: 0, 1: 0, 2: 1, 3: 1}
    for own in (first, second):
        assert sorted(parts[index] for index in own) == [0, 1]


def test_a_prompt_that_cannot_be_read_again_ends_all_ranks(monkeypatch):
    groups = [make_groups({0: 10, 3: 6, 5: 9}), make_groups({1: 2, 4: 1})]
    first, second = run_ranks(monkeypatch, groups, broken=0)
    assert "another process of this run has failed" in first
    assert second == "image 3.png cannot be read"


def test_one_rank_exchanges_nothing():
    groups = make_groups({3: 1, 1: 5})
    ranks: Any = SimpleNamespace(process_index=0, num_processes=1)
    own, received, parts = balance_groups(groups, {3: 1, 1: 5}, lambda _: [], ranks, 2)
    assert (list(own), own, received) == ([3, 1], groups, ())  # in the same order
    assert parts == {1: 0, 3: 1}
