"""The rollout and batch of a trainer's step, and the prompt that completions were sampled from."""

import pytest
import torch

from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.policy import Policy
from vlm_grpo.training.batch import Rollout, StepBatch
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Group, Prompt


def capture_step(trainer: Trainer) -> tuple[dict[str, float], Rollout, StepBatch]:
    """Run one step and return its metrics, rollout and batch."""
    rollouts, batches = list[Rollout](), list[StepBatch]()
    score, update = trainer.updater.score, trainer.updater.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.updater, "score", lambda r: rollouts.append(r) or score(r))
        patch.setattr(trainer.updater, "update", lambda b: batches.append(b) or update(b))
        metrics = trainer.step()
    return metrics, rollouts[0], batches[0]


def assert_sampled_behind(policy: Policy, group: Group, other: Prompt) -> None:
    """Check that only the completions with a variant were sampled behind the other prompt."""
    assert group.prompt.variant is None
    for completion in group.completions:
        errors = []
        for prompt in (group.prompt, other):
            batch = MicroBatch((GroupSlice(prompt, (completion.token_ids,), (0,)),))
            with torch.no_grad():
                scored = policy.score(batch).logprobs
            errors.append((scored - torch.tensor(completion.logprobs)).abs().max())
        right, wrong = errors if completion.variant is None else errors[::-1]
        assert right < 1e-4 < wrong  # rounding; another image


def let_first_differ(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Treat all groups of a step but the first as groups with equal rewards."""
    patch.setattr(trainer.sampler, "_split_by_spread", lambda x, _: ([*x][:1], [*x][1:]))
