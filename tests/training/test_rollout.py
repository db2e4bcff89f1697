"""The rollout of a step: resampled groups, lack of memory, and failures."""

import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_runs import TASK, make_trainer

from vlm_grpo.errors import UserError


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


def test_a_failure_here_or_on_another_rank_or_of_a_reward_on_every_completion_ends_the_rollout(
    settings, monkeypatch, tmp_path
):
    sampler = make_trainer(settings()).sampler
    # Of the flags of all ranks, that of a failure is set.
    monkeypatch.setattr(sampler, "_add_ranks", lambda flags: [0, 1])
    with pytest.raises(UserError, match="another process"):
        sampler.sample(0)
    monkeypatch.setattr(sampler.policy, "sample", Mock(side_effect=RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes"):
        sampler.sample(0)
    broken = "    @reward()\n    def broken(self, answer, example):\n        raise ValueError\n"
    (tmp_path / "broken.py").write_text(f"{TASK}\n{broken}")
    sampler = make_trainer(settings(task=str(tmp_path / "broken.py"))).sampler
    with pytest.raises(UserError, match="reward broken failed on every completion"):
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
def test_groups_with_spread_come_before_equal_ones(
    settings, monkeypatch, spread, chosen, resampled
):
    """A step of three groups, those with a spread by their index, and one round of replacement."""
    run = settings(rollout={"dynamic_sampling": True, "max_resample": 1})
    sampler = make_trainer(run).sampler
    ids = {sampler.stream[index].id: index for index in range(5)}
    has_spread = "vlm_grpo.training.rollout.has_spread"
    monkeypatch.setattr(has_spread, lambda group, *_: ids[group.id] in spread)
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
