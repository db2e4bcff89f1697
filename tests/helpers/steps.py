"""The rollout, batch and gradients of a trainer's step, and the prompt of completions."""

from typing import Any

import pytest
import torch
from recorded import record_calls
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.policy import Policy
from vlm_grpo.training.step_batch import Rollout, StepBatch
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Group, Prompt


def capture_step(trainer: Trainer) -> tuple[dict[str, float], Rollout, StepBatch]:
    """Run one step and return its metrics, rollout and batch."""
    with pytest.MonkeyPatch.context() as patch:
        calls = [record_calls(patch, trainer.updater, name) for name in ("score", "update")]
        metrics = trainer.step()
    scored, updated = (own[0].arguments[0] for own in calls)
    return metrics, scored, updated


def record_updates(
    patch: pytest.MonkeyPatch, strategy: Strategy
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return lists that receive the weights and the reduced gradients before each update."""
    weights, gradients = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    step = strategy.step

    def copy(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    def record_and_step() -> float:
        trained = strategy.trainable
        weights.append({name: copy(weight) for name, weight in trained})
        gradients.append({name: copy(w.grad) for name, w in trained if w.grad is not None})
        return step()

    patch.setattr(strategy, "step", record_and_step)
    return weights, gradients


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
