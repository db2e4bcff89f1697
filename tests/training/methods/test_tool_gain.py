"""A part of each group without tools, and the difference as the advantage of the first call."""

from statistics import fmean

import numpy as np
import pytest
import small_environments
import torch
from small_runs import make_trainer
from steps import capture_step

from vlm_grpo.model.episodes import REFUSAL
from vlm_grpo.training.methods.tool_gain import credit_calls


def credit_by_hand(rewards: list[float], counted: list[bool], calls: list[int], refused: int):
    """Return the advantage of a token of the first call and of others of each; ``coef`` is 0.5."""
    split = len(rewards) - refused
    parts = [
        fmean(r for r, own in zip(rewards[a:b], counted[a:b], strict=True) if own)
        for a, b in ((0, split), (split, None))
    ]
    for row, (reward, is_counted, call) in enumerate(zip(rewards, counted, calls, strict=True)):
        own = (reward - parts[row >= split]) * is_counted
        first = (own + 0.5 * (parts[0] - parts[1])) * is_counted * (row < split)
        yield first if call else own, own


def test_advantages_are_those_of_parts_with_the_difference_on_the_first_call():
    random = np.random.default_rng(0)
    for size, refused in ((4, 1), (6, 3), (8, 6), (16, 4)):
        rewards = random.normal(size=size)
        counted = random.random(size) < 0.8
        counted[[0, -1]] = True
        lengths = random.integers(2, 6, size)
        calls = random.integers(0, 3, size) % lengths
        given = torch.tensor(rewards - rewards.mean()), torch.tensor(counted)
        found = credit_calls(*given, calls.tolist(), lengths.tolist(), refused, 0.5)
        by_hand = credit_by_hand(rewards.tolist(), counted.tolist(), calls.tolist(), refused)
        for part, call, (first, other) in zip(found, calls, by_hand, strict=True):
            expected = [first] * call + [other] * (len(part) - call)
            assert part.tolist() == pytest.approx(expected, abs=1e-14)
    # Nothing to compare with: all but refused calls keep their advantages.
    alone = torch.tensor([True, True, False, False])
    kept = credit_calls(torch.tensor([1.0, -1.0, 3.0, 3.0]), alone, [1, 0, 1, 0], [2] * 4, 2, 1.0)
    assert [part.tolist() for part in kept] == [[1, 1], [-1, -1], [0, 0], [0, 0]]


def test_a_step_refuses_a_part_and_credits_the_calls_of_the_other(settings, monkeypatch):
    monkeypatch.setattr("vlm_grpo.model.prompts.TOOLS", "Look.")  # nine tenths of the prompts
    peek = {"name": f"{small_environments.__file__}:Peek", "max_turns": 3}
    methods = [{"file": "tool_gain", "options": {"share": 0.5, "coef": 0.5}}]
    rollout = {"num_generations": 6, "max_completion_length": 2}  # some episodes call nothing
    changes = {"rollout": rollout, "methods": methods, "objective": {"scale_rewards": "none"}}
    run = settings(task_options={"environment": peek}, **changes)
    trainer = make_trainer(run)
    metrics, rollout, batch = capture_step(trainer)
    trainer.sampler.close()
    tokens = iter(batch.layout.split(batch.values["token_advantages"]))
    kinds, differences = set(), []
    for group in rollout.groups:
        rewards = [s.total for s in group.scores if s.total is not None]
        firsts = [c.observations[0].start if c.observations else 0 for c in group.completions]
        by_hand = credit_by_hand(rewards, [True] * 6, firsts, 3)
        differences.append(fmean(rewards[:3]) - fmean(rewards[3:]))
        for row, (completion, expected) in enumerate(zip(group.completions, by_hand, strict=True)):
            answers = [turn.observed for turn in completion.turns if turn.observed is not None]
            assert all((answer == REFUSAL) == (row >= 3) for answer in answers)
            found, first = next(tokens), firsts[row]
            kinds.add((row >= 3, bool(first)))
            values = [expected[0]] * first + [expected[1]] * (len(found) - first)
            assert found.tolist() == pytest.approx(values, abs=1e-6)  # float32
    assert kinds >= {(False, False), (False, True), (True, True)}  # (refused, has called)
    assert metrics["tool_gain/difference"] == pytest.approx(fmean(differences))
    assert metrics["tools/errors"] == 0  # a refusal is none
