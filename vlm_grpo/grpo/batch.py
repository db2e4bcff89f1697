"""The batch of a step: its completions with the inputs of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.collectives import sum_over_ranks
from vlm_grpo.engine.batch import GroupSlice
from vlm_grpo.objective import StepTotals, needs_update
from vlm_grpo.types import Group


@dataclass(frozen=True)
class StepBatch:
    """The n completions of a step on this rank, with the inputs of the loss.

    Attributes:
        slices: the completions that have a gradient, by group.
        advantages: (n,) advantage of each completion.
        active: (n,) False for a truncated completion that is masked out.
        sampler_logprobs: for each completion, (T,) log-probs of its tokens when sampled.
        totals: the normalizers of the loss, over all ranks.
        reference_logprobs: (T,) log-probs under the reference policy by completion; empty if no
            separate reference is kept.
    """

    slices: tuple[GroupSlice, ...]
    advantages: Tensor
    active: Tensor
    sampler_logprobs: tuple[Tensor, ...]
    totals: StepTotals
    reference_logprobs: Mapping[int, Tensor]


def build_slices(groups: Sequence[Group], keep: Sequence[bool]) -> tuple[GroupSlice, ...]:
    """Build slices of the completions to keep; groups without any are left out.

    Args:
        groups: groups with n completions in all, numbered in order.
        keep: n flags, True for each completion to keep.
    """
    slices, start = [], 0
    for group in groups:
        rows = [row for row in range(start, start + len(group.completions)) if keep[row]]
        if rows:
            tokens = tuple(group.completions[row - start].token_ids for row in rows)
            slices.append(GroupSlice(group.prompt, tokens, tuple(rows)))
        start += len(group.completions)
    return tuple(slices)


def pack_step(
    groups: Sequence[Group],
    advantages: Tensor,
    reference_logprobs: Mapping[int, Tensor],
    settings: Settings,
    accelerator: Accelerator,
) -> StepBatch:
    """Pack a step's completions into the batch of its update.

    Args:
        groups: this rank's groups, n completions in all.
        advantages: (n,) advantage of each completion.
        reference_logprobs: (T,) log-probs by completion; empty if no separate reference is kept.
        settings: the run's settings.
        accelerator: the ranks.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    active = torch.ones(len(completions), dtype=torch.bool)
    if settings.objective.mask_truncated_completions:
        active = torch.tensor([c.stop != "length" for c in completions], dtype=torch.bool)
    own = StepTotals.from_lengths(lengths, active, settings.rollout.max_completion_length)
    sums = torch.tensor([own.completions, own.active_tokens], device=accelerator.device)
    sum_over_ranks(accelerator, [sums])
    totals = StepTotals(int(sums[0]), int(sums[1]), own.max_completion_length)
    keep = needs_update(advantages, active, settings.objective)
    return StepBatch(
        build_slices(groups, keep.tolist()),
        advantages,
        active,
        tuple(torch.tensor(c.logprobs) for c in completions),
        totals,
        reference_logprobs,
    )
