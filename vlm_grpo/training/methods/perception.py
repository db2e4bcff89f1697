"""The dependency of tokens on the image: a term of the loss, and factors of the policy loss.

PAPO (arXiv:2507.06448) raises the KL of the policy to itself behind masked images; VPPO
(arXiv:2510.09285) trains the tokens and completions most that depend on their images most. Both
need one more pass without gradient, behind the masked images.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.media.images import PatchMask
from vlm_grpo.training.batch import Rollout, Values
from vlm_grpo.training.methods import ImageMethod, Passes
from vlm_grpo.training.objective.losses import image_dependency
from vlm_grpo.types import Example, Group


class Perception(ImageMethod):
    """The KL of the policy to itself behind masked images, and weights of tokens by it."""

    name, block = "perception", "objective.perception"
    own: PerceptionSettings

    def score(self, passes: Passes) -> Values:
        """Score the completions behind masked images; without images they count as unchanged."""
        rollout = passes.rollout

        def mask(group: Group) -> Example | None:
            example = group.prompt.example
            seed = self.run.settings.seed, rollout.step, zlib.crc32(example.id.encode())
            change = PatchMask(self.own.mask_ratio, self.own.patch_size, seed)
            return example.with_noise(change) if example.images else None

        return {self.name: passes.score(passes.behind(mask), rollout.sampler_logprobs).logprobs}

    def weigh_tokens(self, rollout: Rollout, scores: Values) -> Tensor | None:
        if not self.own.weighs_tokens:
            return None
        groups = (*rollout.groups, *rollout.recalled)
        covered = [self.covers(group) for group in groups for _ in group.completions]
        masked = scores[self.name].cpu()
        sampled = rollout.sampler_logprobs.to(masked)
        pairs = zip(rollout.layout.split(sampled), rollout.layout.split(masked), strict=True)
        dependency = {
            row: image_dependency(*pair) for row, pair in enumerate(pairs) if covered[row]
        }
        return weigh_by_dependency(dependency, rollout.layout.lengths.tolist(), self.own)


def weigh_by_dependency(
    dependency: Mapping[int, Tensor], lengths: Sequence[int], settings: PerceptionSettings
) -> Tensor:
    """Return the (T,) factors of the tokens' policy losses, as VPPO sets them.

    A factor is 0 for tokens whose dependency is not among the ``top_share`` of their completion,
    and otherwise min_scale + (1 − min_scale)·s / mean(s), where s is the completion's mean
    dependency, mapped to 0 to 1 over all completions with images, on all ranks, whose mean factor
    is then 1. ``dependency`` is that of each token on the image, by completion; others have factors
    of 1. All ranks must call it.
    """
    means = {row: values.mean().item() for row, values in dependency.items()}
    every = gather_object([*means.values()])
    low, high = min(every, default=0.0), max(every, default=0.0)
    spread = high - low
    mean = sum(value - low for value in every) / max(len(every), 1)
    factors = [torch.ones(length) for length in lengths]
    for row, values in dependency.items():
        if settings.top_share is not None:
            count = math.ceil(len(values) * settings.top_share)
            factors[row] = torch.zeros(len(values))
            factors[row][values.topk(count).indices] = 1.0
        if settings.min_scale is not None and spread > 1e-6:
            share = (means[row] - low) / mean
            factors[row] = factors[row] * (settings.min_scale + (1 - settings.min_scale) * share)
    return torch.cat(factors) if factors else torch.zeros(0)
