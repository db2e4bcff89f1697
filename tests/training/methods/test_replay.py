"""What a run learns of its examples: their difficulty, and groups to replay."""

import itertools
import json
import random
import statistics
from typing import Any
from unittest.mock import Mock

import pytest
from small_runs import assert_resumes, make_trainer, read_metrics
from steps import capture_step, let_first_differ

from vlm_grpo.config.methods import ReplaySettings
from vlm_grpo.errors import UserError
from vlm_grpo.training.methods import Passes
from vlm_grpo.training.methods.replay import Replay, select_varied
from vlm_grpo.training.step_batch import KeptGroup, Rollout, build_slices
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Completion, Score

BOTH = {
    "data": {"curriculum": {"pool": 2}},
    "objective": {"replay": {"size": 3, "max_age": 2}},
    # With at most two letters, some groups of two have equal rewards.
    "rollout": {"num_generations": 2, "max_completion_length": 2},
    "optim": {"max_steps": 5, "lr": 1e-3},
}


def keep(index: int, step: int) -> KeptGroup:
    completion = Completion((index, 7), (-0.5, -index / 3), f"text {index}", "eos")
    return KeptGroup(index, step, (completion,), (Score(None, {"r": 1.0}, 1.0, {"m": None}),))


def get_buffer(trainer: Trainer) -> Any:
    return trainer.methods["replay"]


def test_a_buffer_replays_the_newest_first_and_each_group_once():
    buffer = Replay(ReplaySettings(size=4, max_age=2))
    assert buffer.recall(3, 0) == []
    for step in range(3):
        buffer.learn(step, [keep(2 * step + 1, step), keep(2 * step, step)], [])
    assert [group.index for group in buffer.groups] == [2, 3, 4, 5]  # four groups at most
    assert [group.index for group in buffer.recall(3, 3)] == [5, 4, 3]
    assert [group.index for group in buffer.recall(9, 4)] == [5, 4]  # the others are 3 steps old
    assert buffer.recall(0, 3) == []
    buffer.learn(3, [keep(6, 3)], buffer.recall(1, 3))
    assert [group.index for group in buffer.groups] == [2, 3, 4, 6]


def test_the_kept_completions_have_the_largest_variance_of_rewards():
    """Compared with all choices of as many."""
    draw = random.Random(0)
    for _ in range(200):
        rewards = [draw.choice((0.0, 0.2, 1.0, draw.random())) for _ in range(draw.randint(3, 8))]
        count = draw.randint(2, len(rewards) - 1)
        chosen = select_varied(rewards, count)
        assert chosen == sorted({*chosen})
        assert len(chosen) == count
        best = max(map(statistics.pvariance, itertools.combinations(rewards, count)))
        assert statistics.pvariance([rewards[row] for row in chosen]) == pytest.approx(best)
    assert select_varied([0.0, None, 1.0, None], 3) == [0, 2]
    assert select_varied([None, 1.0], None) == select_varied([None, 1.0], 2) == [0, 1]


def test_a_wide_group_is_replayed_with_its_best_and_its_worst(settings):
    """The gradient of such a group is that of a group of these completions, so advantages too."""
    trainer = make_trainer(settings(objective={"replay": {"completions": 2}}))
    groups = {group.id: group for group in trainer.sampler.sample(0).groups}
    kept = get_buffer(trainer).groups
    assert len(kept) == 3
    for group in kept:
        sampled = groups[trainer.sampler.stream[group.index].id]
        totals = [score.total or 0.0 for score in sampled.scores]
        assert sorted(score.total or 0.0 for score in group.scores) == [min(totals), max(totals)]
        for completion, score in zip(group.completions, group.scores, strict=True):
            place = [c.token_ids for c in sampled.completions].index(completion.token_ids)
            assert completion.logprobs == sampled.completions[place].logprobs
            assert score.rewards == sampled.scores[place].rewards
    # Only groups with different rewards are kept: now all totals are 0.
    object.__setattr__(trainer.sampler.task, "weights", {"letters": 0.0})
    _, rollout, _ = capture_step(trainer)
    assert [group.id for group in rollout.recalled] == [*reversed(groups)]
    assert get_buffer(trainer).groups == []


def test_groups_without_a_spread_let_others_be_replayed(settings, monkeypatch):
    """Two of three in each step after the first. ``tests/test_wiring.py`` has their gradient."""
    optim = {"lr": 1e-3, "max_steps": 4, "mini_batches": 3}
    rollout = {"max_completion_length": 12}  # so long that the reward always differs
    run = settings(objective={"replay": {}}, optim=optim, rollout=rollout)
    trainer = make_trainer(run)
    first = trainer.step()
    assert [group.index for group in get_buffer(trainer).groups] == [0, 1, 2]
    let_first_differ(monkeypatch, trainer)
    later, rollouts, _ = zip(*(capture_step(trainer) for _ in range(3)), strict=True)
    metrics = [first, *later]
    assert [row["replay/groups"] for row in metrics] == [0, 2, 2, 2]
    assert [row.get("replay/age") for row in metrics] == [None, 1, 1, 1]
    replayed = [[group.id for group in rollout.recalled] for rollout in rollouts]
    stream = trainer.sampler.stream
    assert replayed == [[stream[i].id, stream[i - 1].id] for i in (2, 5, 8)]
    assert all(len(rollout.groups) == 3 for rollout in rollouts)
    # In turn, so that no mini-batch gets all of them.
    assert {rollout.mini_batches[-2:] for rollout in rollouts} == {(0, 1)}


def test_other_forms_of_prompts_are_those_of_the_sampled_groups(settings):
    """The slices of replayed groups are last."""
    trainer = make_trainer(settings())
    groups = trainer.sampler.sample(0).groups
    rollout = Rollout(groups[:2], recalled=groups[2:])
    slices = build_slices(groups, [True] * len(rollout.completions))
    passes = Passes(rollout, slices, trainer.strategy, 1000)
    found = passes.behind(lambda group: group.prompt.example)
    assert [piece.rows for piece in found] == [piece.rows for piece in slices[:2]]
    assert [piece.completions for piece in found] == [piece.completions for piece in slices[:2]]


def test_a_run_with_both_resumes_bit_for_bit(settings):
    changes = {**BOTH, "objective": {**BOTH["objective"], "num_iterations": 2}}
    whole, stopped = (settings(name=name, **changes) for name in ("whole", "stopped"))
    assert_resumes(whole, stopped, (2,), (2, 3), last="step-5")
    rows = read_metrics(whole.run_dir)
    assert sum(row["replay/groups"] for row in rows) > 2
    assert 0 < rows[-1]["curriculum/unseen"] < 1


def test_the_state_is_restored_as_it_was():
    replay, restored = (Replay(ReplaySettings(size=3)) for _ in range(2))
    replay.learn(0, [keep(1, 0), keep(2, 0)], [])
    values, tensors = json.loads(json.dumps(replay.state_dict()[0])), replay.state_dict()[1]
    restored.load_state_dict(values, tensors)
    assert restored.groups == replay.groups
    smaller = Replay(ReplaySettings(size=1))  # may change between steps
    smaller.load_state_dict(values, tensors)
    assert [group.index for group in smaller.groups] == [2]
    restored.load_state_dict(None, {})  # of a run without replay


def test_a_failed_step_teaches_nothing(settings, monkeypatch):
    trainer = make_trainer(settings(**{**BOTH, "rollout": {"dynamic_sampling": True}}))
    sampler, replay = trainer.sampler, get_buffer(trainer)
    curriculum: Any = trainer.methods["curriculum"]
    sampler.sample(0)
    before, groups = curriculum.posterior.copy(), list(replay.groups)
    assert len(groups) == 3
    assert sampler.cursor.position == 6  # three prompts of two candidates each
    error = UserError("gold_reward failed")
    measure = "vlm_grpo.training.methods.curriculum.measure_pass"
    monkeypatch.setattr(measure, Mock(side_effect=error))
    with pytest.raises(UserError, match="gold_reward failed"):
        sampler.sample(1)
    assert (curriculum.posterior == before).all()
    assert replay.groups == groups
    assert sampler.cursor.position == 6


def test_supervised_steps_use_every_example_in_turn(settings):
    trainer = make_trainer(settings(data=BOTH["data"], warm_start={"steps": 1, "lr": 1e-4}))
    for unseen, position in ((None, 3), (1.0, 9)):
        assert trainer.step().get("curriculum/unseen") == unseen
        assert trainer.sampler.cursor.position == position
