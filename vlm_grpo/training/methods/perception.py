"""The dependency of tokens on the image: a term of the loss, and factors of the policy loss.

PAPO (arXiv:2507.06448) raises the KL of the policy to itself behind masked images; VPPO
(arXiv:2510.09285) trains the tokens and completions most that depend on their images most. Both
need one more pass without gradient, behind the masked images.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.training.methods import ImageMethod, Passes
from vlm_grpo.training.objective.kl import image_dependency
from vlm_grpo.training.step_batch import Rollout, Values
from vlm_grpo.types import Example, Group


@dataclass(frozen=True)
class PatchMask:
    """A mask that makes some square patches of an image black, each independently."""

    ratio: float  # probability of a patch to be black
    size: int  # side of a patch, in pixels; patches at the right and lower edge may be cut
    seed: tuple[int, ...]  # numbers, at least 0, that determine which patches are black

    def __call__(self, image: Image.Image) -> Image.Image:
        shape = [-(-side // self.size) for side in (image.height, image.width)]
        is_black = np.random.default_rng(self.seed).random(shape) < self.ratio
        mask = Image.fromarray(is_black).resize(
            (shape[1] * self.size, shape[0] * self.size), Image.Resampling.NEAREST
        )
        masked = image.copy()
        masked.paste(0, mask=mask.crop((0, 0, *image.size)))
        return masked


class Perception(ImageMethod):
    """The KL of the policy to itself behind masked images, and weights of tokens by it."""

    name, block = "perception", "objective.perception"
    own: PerceptionSettings

    def score(self, passes: Passes) -> Values:
        """Score the completions behind masked images; without images they count as unchanged."""
        rollout = passes.rollout

        def mask(group: Group) -> Example | None:
            example, own = group.prompt.example, self.own
            if not example.images:
                return None
            seed = self.run.settings.seed, rollout.step, zlib.crc32(example.id.encode())
            return example.with_changes(
                lambda number: PatchMask(own.mask_ratio, own.patch_size, (*seed, number))
            )

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
    mean = sum(value - low for value in every) / max(len(every), 1)
    factors = [torch.ones(length) for length in lengths]
    for row, values in dependency.items():
        if settings.top_share is not None:
            count = math.ceil(len(values) * settings.top_share)
            factors[row] = torch.zeros(len(values))
            factors[row][values.topk(count).indices] = 1.0
        if settings.min_scale is not None and high - low > 1e-6:
            share = (means[row] - low) / mean
            factors[row] = factors[row] * (settings.min_scale + (1 - settings.min_scale) * share)
    return torch.cat(factors) if factors else torch.zeros(0)
