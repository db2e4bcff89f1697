"""The groups of a round as arguments of a sampler, which may take a part of each behind noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vlm_grpo.config.run import Settings
from vlm_grpo.media.images import DiffusionNoise
from vlm_grpo.model.engine.sampling import (
    SamplingDistribution,
    SamplingSettings,
    build_sampling_settings,
)
from vlm_grpo.types import Completion, Prompt


class SamplingArguments(NamedTuple):
    """The arguments of ``Policy.sample``: the prompts of all groups, then those with noise.

    A completion has the same number in its group, and so the same random stream, with and without.
    """

    prompts: list[Prompt]
    sampling: SamplingSettings
    num_generations: list[range]
    seeds: list[tuple[int, int]]

    @classmethod
    def build(
        cls,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        distribution: SamplingDistribution,
        settings: Settings,
    ) -> SamplingArguments:
        """Build the arguments for the groups of prompts with these indices of the stream."""
        rollout, size = settings.rollout, settings.rollout.num_generations
        clean = size if rollout.noise is None else size - rollout.noise.count(size)
        parts = [(p, range(size if p.noisy is None else clean)) for p in prompts]
        parts += [(p.noisy, range(clean, size)) for p in prompts if p.noisy is not None]
        noisy = [i for i, prompt in zip(indices, prompts, strict=True) if prompt.noisy is not None]
        asked, numbers = ([*column] for column in zip(*parts, strict=True))
        seeds = [(settings.seed, index) for index in (*indices, *noisy)]
        return cls(asked, build_sampling_settings(distribution, rollout), numbers, seeds)


def join_groups(
    prompts: Sequence[Prompt], parts: Sequence[tuple[Completion, ...]]
) -> tuple[list[Prompt], list[tuple[Completion, ...]]]:
    """Join the completions of ``SamplingArguments.prompts``; return prompts without ``noisy``."""
    rest, groups = iter(parts[len(prompts) :]), []
    for prompt, members in zip(prompts, parts, strict=False):
        noise = None if prompt.noisy is None else prompt.noisy.example.images[0].noise
        if isinstance(noise, DiffusionNoise):
            members = (*members, *(replace(c, noise=noise.steps) for c in next(rest)))
        groups.append(members)
    return [p if p.noisy is None else replace(p, noisy=None) for p in prompts], groups
