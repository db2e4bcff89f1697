"""The dependency of tokens on the image: a term of the loss, and factors of the policy loss.

PAPO (arXiv:2507.06448) raises the KL of the policy to itself behind masked images; VPPO
(arXiv:2510.09285) trains the tokens and completions most that depend on their images most. Both
need one more pass without gradient, behind the masked images.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.media.images import PatchMask
from vlm_grpo.model.engine.batch import GroupSlice
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.training.batch import Rollout, copy_to_host
from vlm_grpo.training.methods import Method, ScoredStep, Scores
from vlm_grpo.training.objective.batch import TokenBatch
from vlm_grpo.training.objective.kl import image_dependency
from vlm_grpo.training.objective.losses import LossInputs, Shares
from vlm_grpo.types import Group


class Perception(Method):
    """The KL of the policy to itself behind masked images, and weights of tokens by it."""

    name = phase = "perception"

    @classmethod
    def is_used(cls, objective: ObjectiveSettings) -> bool:
        return objective.perception is not None

    def score(self, step: ScoredStep) -> Scores:
        """Score the completions behind masked images; without images they count as unchanged."""
        completions = [c for group in step.rollout.groups for c in group.completions]
        sampled = {row: torch.tensor(c.logprobs) for row, c in enumerate(completions)}
        prompts = step.scorer.policy.prompts
        behind = mask_images(step.slices, prompts, self.settings, step.rollout.step)
        return {"masked_logprobs": sampled | step.scorer.policy_logprobs(behind)}

    def weigh_tokens(self, rollout: Rollout, scores: Scores) -> Mapping[int, Tensor] | None:
        settings = self.settings.objective.perception
        if settings is None or not settings.weighs_tokens:
            return None
        pairs = [(group, c) for group in rollout.groups for c in group.completions]
        sampled = [torch.tensor(completion.logprobs) for _, completion in pairs]
        masked = scores["masked_logprobs"]
        behind = {row: masked[row] for row, (group, _) in enumerate(pairs) if self.covers(group)}
        return weigh_by_dependency(sampled, behind, settings)

    @classmethod
    def add_weights(
        cls, weights: dict[str, Tensor], shares: Shares, objective: ObjectiveSettings
    ) -> None:
        if objective.perception is not None and objective.perception.kl_coef:
            weights["perception"] = -objective.perception.kl_coef * shares.policy

    @classmethod
    def covers(cls, group: Group) -> bool:
        return bool(group.prompt.example.images)

    @classmethod
    def term(cls, inputs: LossInputs) -> Float[Tensor, " M"]:
        """Return the dependency of each token on the image, whose gradient is that of the policy
        conditioned on the image (PAPO, arXiv:2507.06448, eq. 4; the masked side has none, as in the
        authors' code)."""
        masked = inputs.batch.scores.get("masked_logprobs")
        if masked is None:
            raise ValueError("perception needs masked_logprobs in the batch")
        return image_dependency(inputs.batch.logprobs, masked)

    @classmethod
    def metrics(cls, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        masked = batch.scores.get("masked_logprobs")
        return {} if masked is None else {"perception/kl": image_dependency(batch.logprobs, masked)}


def mask_images(
    slices: Sequence[GroupSlice], prompts: PromptBuilder, settings: Settings, step: int
) -> list[GroupSlice]:
    """Return the groups that have images, behind masked copies of these.

    Args:
        slices: the completions of a step, by group.
        prompts: builds the model's prompts.
        settings: the run's settings, with those of the mask.
        step: number of steps before this one.
    """
    perception, masked = settings.objective.perception, []
    assert perception is not None
    for piece in slices:
        example = piece.prompt.example
        if example.images:
            seed = settings.seed, step, zlib.crc32(example.id.encode())
            mask = PatchMask(perception.mask_ratio, perception.patch_size, seed)
            prompt = prompts.encode_text(example.with_noise(mask), piece.prompt.text)
            masked.append(replace(piece, prompt=prompt))
    return masked


def weigh_by_dependency(
    sampled: Sequence[Tensor], masked: Mapping[int, Tensor], settings: PerceptionSettings
) -> dict[int, Tensor]:
    """Return the (T,) factors of the tokens' policy losses by completion, as VPPO sets them.

    A factor is 0 for tokens whose dependency is not among the ``top_share`` of their completion,
    and otherwise min_scale + (1 − min_scale)·s / mean(s), where s is the completion's mean
    dependency, mapped to 0 to 1 over all completions with images, on all ranks, whose mean factor
    is then 1. All ranks must call it.

    Args:
        sampled: (T,) log-probs of each completion's tokens when sampled.
        masked: those behind masked images, by completion; others have factors of 1.
        settings: the share and the scale.
    """
    dependency = {
        row: image_dependency(sampled[row].to(values), values)
        for row, values in copy_to_host(masked).items()
    }
    means = {row: values.mean().item() for row, values in dependency.items()}
    every = gather_object([*means.values()])
    low, high = min(every, default=0.0), max(every, default=0.0)
    spread = high - low
    mean = sum(value - low for value in every) / max(len(every), 1)
    factors = {row: torch.ones(len(values)) for row, values in enumerate(sampled)}
    for row, values in dependency.items():
        if settings.top_share is not None:
            count = math.ceil(len(values) * settings.top_share)
            factors[row] = torch.zeros(len(values))
            factors[row][values.topk(count).indices] = 1.0
        if settings.min_scale is not None and spread > 1e-6:
            share = (means[row] - low) / mean
            factors[row] = factors[row] * (settings.min_scale + (1 - settings.min_scale) * share)
    return factors
