"""The rollout of a step: resampled groups, lack of memory, and failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from groups import make_group, truncate
from small_runs import TASK, make_trainer
from tiny_models import make_prompt, noise_example, tiny_policy

from vlm_grpo.dist import collectives
from vlm_grpo.errors import UserError
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training import rollout as rollout_module
from vlm_grpo.training.batch import Rollout, score_groups
from vlm_grpo.training.rollout import balance_groups, estimate_cost
from vlm_grpo.types import Completion, Example, Group, Prompt, Score


def get_tokens(rollout: Rollout) -> list[tuple[int, ...]]:
    return [c.token_ids for group in rollout.groups for c in group.completions]


@pytest.mark.parametrize("limit", [130, 1])
def test_a_rollout_that_runs_out_of_memory_samples_the_same_tokens_in_parts(
    settings, monkeypatch, limit
):
    sampler = make_trainer(settings()).sampler
    sample = sampler.policy.sample
    expected = sampler.sample(0)
    assert expected.resampled == 0  # without dynamic sampling

    def sample_within_limit(*args: Any) -> Any:
        if (args[4] or sys.maxsize) > limit:
            raise torch.OutOfMemoryError("out of memory")
        return sample(*args)

    monkeypatch.setattr(sampler.policy, "sample", sample_within_limit)
    sampler.cursor.position = 0
    if limit == 1:
        with pytest.raises(UserError, match="num_generations"):
            sampler.sample(0)
        return
    assert get_tokens(sampler.sample(0)) == get_tokens(expected)
    assert sampler.budget.limit <= limit


def test_other_errors_of_sampling_are_raised(settings, monkeypatch):
    sampler = make_trainer(settings()).sampler
    error = RuntimeError("shapes do not match")
    monkeypatch.setattr(sampler.policy, "sample", Mock(side_effect=error))
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


def test_ranks_share_the_prompts_of_a_step(settings, monkeypatch):
    monkeypatch.setattr(rollout_module, "any_rank", lambda ranks, flag: flag)
    monkeypatch.setattr(rollout_module, "sum_over_ranks", lambda ranks, tensors: None)
    shares = []
    for rank in range(2):
        sampler = make_trainer(settings()).sampler
        ranks: Any = SimpleNamespace(process_index=rank, num_processes=2, device="cpu")
        monkeypatch.setattr(sampler, "accelerator", ranks)
        monkeypatch.setattr(sampler, "world_size", 2)
        sampler.sample(0)
        shares += [group.id for group in sampler.sample(0).groups]
    # prompts_per_step=3, the second step
    assert sorted(shares) == sorted(sampler.stream[index].id for index in (3, 4, 5))


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


def test_a_failed_rollout_leaves_the_position(settings, monkeypatch):
    sampler = make_trainer(settings()).sampler
    sampler.sample(0)
    load = sampler.loader.load
    error = UserError("an image cannot be read")
    monkeypatch.setattr(sampler.loader, "load", Mock(side_effect=error))
    with pytest.raises(UserError, match="cannot be read"):
        sampler.sample(0)
    assert sampler.cursor.position == 3
    monkeypatch.setattr(sampler.loader, "load", load)
    assert len(sampler.sample(0).groups) == 3
    assert sampler.cursor.position == 6


def test_scores_return_to_their_groups():
    """The scorer receives all completions in one list."""
    policy = tiny_policy("qwen2_5_vl")
    prompts = [make_prompt(policy, noise_example(name, [])) for name in ("a", "b")]
    completions = [
        tuple(Completion((1,) * length, (), f"{name}{length}", "eos") for length in lengths)
        for name, lengths in (("a", (1, 2)), ("b", (3, 4, 5)))
    ]

    def score(
        task: Any,
        texts: list[str],
        examples: list[Example],
        lengths: list[int],
        groups: list[int],
        turns: list[Any],
    ) -> list[Score]:
        assert groups == [0, 0, 1, 1, 1]
        pairs = zip(texts, examples, lengths, strict=True)
        assert all(text == f"{example.id}{length}" for text, example, length in pairs)
        return [Score(text, {}, None, {}) for text in texts]

    scorer: Any = score
    groups = score_groups(scorer, PlainQuestion(), prompts, completions)
    assert [group.prompt for group in groups] == prompts
    assert [[score.answer for score in group.scores] for group in groups] == [
        ["a1", "a2"],
        ["b3", "b4", "b5"],
    ]


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
    monkeypatch.setattr(rollout_module, "gather_object", exchange.gather)
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
    (first, parts), (second, _) = run_ranks(monkeypatch, groups)
    assert parts == dict.fromkeys([0, 1, 3, 4, 5], 0)
    assert (list(first), list(second)) == ([3, 5], [0, 1, 4])
    moved, original = second[0], groups[0][0]
    assert (moved.completions, moved.scores) == (original.completions, original.scores)
    assert moved.id == "loaded 0"  # images are not sent
    assert first == {i: groups[0][i] for i in (3, 5)}


def test_even_groups_stay(monkeypatch):
    groups = [make_groups({0: 10, 3: 6}), make_groups({1: 8, 4: 8})]
    parts = dict.fromkeys([0, 1, 3, 4], 0)
    assert run_ranks(monkeypatch, groups) == [(groups[0], parts), (groups[1], parts)]


def test_each_mini_batch_is_balanced(monkeypatch):
    """The ranks' sums are equal at first, but each has one mini-batch to itself."""
    groups = [make_groups({0: 5, 1: 5}), make_groups({2: 5, 3: 5})]
    (first, parts), (second, same) = run_ranks(monkeypatch, groups, mini_batches=2)
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
    own, parts = balance_groups(groups, {3: 1, 1: 5}, lambda _: [], ranks, 2)
    assert (list(own), own) == ([3, 1], groups)  # in the same order
    assert parts == {1: 0, 3: 1}
