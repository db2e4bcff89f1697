"""The rollout of a step: resampled groups, lack of memory, and failures."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from groups import make_group
from small_runs import TASK, make_trainer

from vlm_grpo.errors import UserError
from vlm_grpo.training import rollout as rollout_module
from vlm_grpo.training.balance import balance_groups, estimate_cost
from vlm_grpo.types import Example, Group, Prompt


@pytest.mark.parametrize("limit", [130, 1])
def test_a_rollout_that_runs_out_of_memory_samples_the_same_tokens_in_parts(
    settings, monkeypatch, limit
):
    sampler = make_trainer(settings()).sampler
    sample = sampler.policy.sample
    expected = sampler.sample(0)
    assert expected.resampled == 0  # without dynamic sampling

    budgets = []

    def sample_within_limit(*args: Any) -> Any:
        budgets.append(args[4])
        if (args[4] or sys.maxsize) > limit:
            raise torch.OutOfMemoryError("out of memory")
        return sample(*args)

    monkeypatch.setattr(sampler.policy, "sample", sample_within_limit)
    sampler.cursor.position = 0
    if limit == 1:
        with pytest.raises(UserError, match="num_generations"):
            sampler.sample(0)
        # The longest prompt with all its completions, which are sampled together.
        prompts = [group.prompt.token_ids for group in expected.groups]
        rollout = sampler.settings.rollout
        least = max(map(len, prompts)) + rollout.num_generations * rollout.max_completion_length
        assert budgets[-1] == least < budgets[-2]
        return
    found = [group.completions for group in sampler.sample(0).groups]
    for group, own in zip(expected.groups, found, strict=True):
        assert [c.token_ids for c in own] == [c.token_ids for c in group.completions]
    assert sampler.budget.limit <= limit


def test_other_errors_of_sampling_are_raised(settings, monkeypatch):
    sampler = make_trainer(settings()).sampler
    monkeypatch.setattr(sampler.policy, "sample", Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes"):
        sampler.sample(0)


def test_dynamic_sampling_replaces_uniform_groups_up_to_its_limit(settings):
    sampler = make_trainer(settings(rollout={"dynamic_sampling": True, "max_resample": 2})).sampler
    assert sampler.sample(0).resampled == 0  # this reward differs in every group
    object.__setattr__(sampler.task, "weights", {"letters": 0.0})
    position = sampler.cursor.position
    rollout = sampler.sample(0)
    # Now all totals are 0: two rounds of 3 new prompts, then the step continues with the first 3.
    assert rollout.resampled == 6
    assert sampler.cursor.position == position + 9
    expected = [sampler.stream[position + place].id for place in range(3)]
    assert [group.id for group in rollout.groups] == expected


@pytest.mark.parametrize(
    ("spread", "chosen", "resampled"), [({1, 2}, [1, 2, 0], 1), ({2, 3}, [2, 3, 0], 2)]
)
def test_groups_with_spread_come_first_and_equal_ones_fill_the_step(
    settings, monkeypatch, spread, chosen, resampled
):
    """A step of three groups, those with a spread by their index, and one round of replacement."""
    run = settings(rollout={"dynamic_sampling": True, "max_resample": 1})
    sampler = make_trainer(run).sampler
    ids = {sampler.stream[index].id: index for index in range(5)}
    monkeypatch.setattr(rollout_module, "has_spread", lambda group, *_: ids[group.id] in spread)
    rollout = sampler.sample(0)
    assert [ids[group.id] for group in rollout.groups] == chosen
    assert (rollout.resampled, sampler.cursor.position) == (resampled, 3 + resampled)


def test_the_next_prompts_are_loaded_ahead_and_closing_stops_the_scorer(settings, monkeypatch):
    sampler = make_trainer(settings()).sampler
    ahead: list[Any] = []
    monkeypatch.setattr(sampler.loader, "prefetch", lambda indices, noise: ahead.append(indices))
    monkeypatch.setattr(sampler.scorer, "close", lambda: ahead.append("closed"))
    sampler.sample(0)
    sampler.close()
    assert ahead == [[3, 4, 5], "closed"]


def test_a_failure_of_another_rank_ends_the_rollout(settings, monkeypatch):
    sampler = make_trainer(settings()).sampler
    # Of the flags of all ranks, that of a failure is set.
    monkeypatch.setattr(sampler, "_add_ranks", lambda flags: [0, 1])
    with pytest.raises(UserError, match="another process"):
        sampler.sample(0)


def test_a_reward_that_fails_on_every_completion_ends_the_rollout(settings, tmp_path):
    broken = "    @reward()\n    def broken(self, answer, example):\n        raise ValueError\n"
    (tmp_path / "broken.py").write_text(f"{TASK}\n{broken}")
    sampler = make_trainer(settings(task=str(tmp_path / "broken.py"))).sampler
    with pytest.raises(UserError, match="reward broken failed on every completion"):
        sampler.sample(0)


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
    group = make_group(*({"exact": r} for r in rewards), lengths=(3, 5))
    first, second = group.completions
    group = replace(group, completions=(first, replace(second, stop="length")))
    assert estimate_cost(group, {"exact": 1.0}, settings(objective=objective), shared) == cost


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
        monkeypatch.setattr(
            "vlm_grpo.training.balance.gather_object", lambda _, sent=sent: next(sent)
        )
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
