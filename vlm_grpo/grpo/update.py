"""One step's update: groups and advantages in, changed weights out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.fsdp import DataParallel
from vlm_grpo.distributed.launch import sum_over_ranks
from vlm_grpo.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.engine.logprobs import TokenScores
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.memory import is_out_of_memory
from vlm_grpo.grpo.reference import Reference
from vlm_grpo.model.policy import Policy
from vlm_grpo.objective import (
    MetricAccumulator,
    StepTotals,
    TokenBatch,
    kl_penalties,
    needs_update,
    policy_loss,
)
from vlm_grpo.types import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepBatch:
    """All completions of a step on this rank, n of them, with what the loss needs of each.

    Attributes:
        slices: the groups, or what of them has a gradient.
        advantages: (n,).
        active: (n,) False where a truncated completion is masked out.
        sampler_logprobs: for each completion, (T,) its tokens' log-probs when sampled.
        totals: the normalisers, over all ranks.
        reference_logprobs: by completion, (T,) its tokens' log-probs under the reference policy;
            empty where none is kept.
    """

    slices: tuple[GroupSlice, ...]
    advantages: Tensor
    active: Tensor
    sampler_logprobs: tuple[Tensor, ...]
    totals: StepTotals
    reference_logprobs: Mapping[int, Tensor]


def build_slices(groups: Sequence[Group], useful: Sequence[bool]) -> tuple[GroupSlice, ...]:
    """The groups' completions that are marked, numbered through all groups; empty groups left out.

    Args:
        groups: n completions in all.
        useful: one mark for each of them.
    """
    slices, row = [], 0
    for group in groups:
        rows = [r for r in range(row, row + len(group.completions)) if useful[r]]
        if rows:
            tokens = tuple(group.completions[r - row].token_ids for r in rows)
            slices.append(GroupSlice(group.prompt, tokens, tuple(rows)))
        row += len(group.completions)
    return tuple(slices)


def step_batch(
    groups: Sequence[Group],
    advantages: Tensor,
    reference_logprobs: Mapping[int, Tensor],
    settings: Settings,
    accelerator: Accelerator,
) -> StepBatch:
    """What the update needs of a step's groups.

    Args:
        groups: this rank's.
        advantages: one for each of their completions, in order.
        reference_logprobs: by completion; empty where no reference is kept.
    """
    completions = [c for group in groups for c in group.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    active = torch.ones(len(completions), dtype=torch.bool)
    if settings.objective.mask_truncated_completions:
        active = torch.tensor([c.stop != "length" for c in completions], dtype=torch.bool)
    counts = StepTotals.from_lengths(lengths, active, settings.rollout.max_completion_length)
    sums = torch.tensor([counts.completions, counts.active_tokens], device=accelerator.device)
    sum_over_ranks(accelerator, [sums])
    totals = StepTotals(int(sums[0]), int(sums[1]), counts.max_completion_length)
    useful = needs_update(advantages, active, settings.objective)
    return StepBatch(
        build_slices(groups, useful.tolist()),
        advantages,
        active,
        tuple(torch.tensor(c.logprobs) for c in completions),
        totals,
        reference_logprobs,
    )


@dataclass
class Updates:
    """The updates made so far on one step's completions.

    Attributes:
        count: how many.
        old_logprobs: by completion, (T,) its tokens' log-probs before the first of them; kept
            where there are several.
        losses: of each.
        norms: the gradient's in each.
        metrics: of all of them together.
    """

    count: int = 0
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)

    @property
    def skipped(self) -> int:
        """How many were left out because their gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.norms)


@dataclass
class Updater:
    """Runs a step's updates.

    Attributes:
        policy: what is trained.
        placement: where its weights lie, and their optimizer.
        reference: the reference policy.
        scheduler: the optimizer's learning rate, one tick a step.
        max_tokens: tokens of a micro-batch; halved when memory runs out.
    """

    policy: Policy
    placement: DataParallel
    reference: Reference
    scheduler: Any
    accelerator: Accelerator
    settings: Settings
    max_tokens: int

    def __call__(self, batch: StepBatch, done: Updates) -> None:
        """One more update on a step's completions, noted in ``done``.

        The schedule ticks after the last of them, unless none of them could be made.
        """
        loss, metrics = self._accumulate(batch, done.old_logprobs, first=done.count == 0)
        done.norms.append(self.placement.step())
        done.losses.append(loss)
        done.metrics = done.metrics + metrics
        done.count += 1
        is_last = done.count == self.settings.objective.num_iterations
        if is_last and done.skipped < done.count:
            self.scheduler.step()

    def finish(self, done: Updates) -> dict[str, float]:
        """The metrics of a step's updates over all ranks, after the last of them."""
        every = gather_object([(sum(done.losses), done.metrics.cpu())])
        return {
            "loss": sum(loss for loss, _ in every) / done.count,
            "grad_norm": done.norms[-1],
            "skipped_updates": done.skipped,
            **sum((more for _, more in every), MetricAccumulator()).values(),
        }

    def _accumulate(
        self, batch: StepBatch, old: dict[int, Tensor], first: bool
    ) -> tuple[float, MetricAccumulator]:
        """The gradient of the whole step, micro-batch by micro-batch; its loss and metrics.

        Where memory runs out, what has been accumulated is dropped and the step is done again
        in micro-batches of half the size: the gradient is the same.
        """
        while True:
            batches, micro = pack(batch.slices, self.max_tokens), None
            try:
                loss, metrics = 0.0, MetricAccumulator()
                with self.policy.share_image_passes() as finish:
                    for count, micro in enumerate(self.placement.passes(batches), 1):
                        if micro is None:
                            self.placement.dummy_loss().backward()
                            continue
                        share, more = self._backward(micro, batch, old, first)
                        loss, metrics = loss + share, metrics + more
                        finish({image for later in batches[count:] for image in later.images})
                return loss, metrics
            except RuntimeError as error:
                if micro is None or not is_out_of_memory(error):
                    raise
                if len(micro.rows) == 1:
                    raise UserError(
                        f"out of memory on a single completion of {micro.num_tokens} tokens: lower "
                        "policy.max_pixels, set policy.gradient_checkpointing=true, or train LoRA"
                    ) from error
                if not self.placement.may_retry:
                    raise UserError(
                        f"out of memory on a micro-batch of {micro.num_tokens} tokens, and ranks "
                        "that share their weights cannot repeat a step one by one: continue with "
                        f"resume=true optim.max_tokens_per_batch={micro.num_tokens // 2}"
                    ) from error
            self.placement.drop_gradients()
            self.max_tokens = micro.num_tokens // 2
            logger.warning(
                "out of memory: micro-batches are cut to %d tokens from here on; set "
                "optim.max_tokens_per_batch=%d to start there",
                self.max_tokens,
                self.max_tokens,
            )

    def _backward(
        self, micro: MicroBatch, batch: StepBatch, old: dict[int, Tensor], first: bool
    ) -> tuple[float, MetricAccumulator]:
        objective = self.settings.objective
        scores = self.policy.score(micro, objective.entropy_coef > 0)
        tokens = self._token_batch(micro, scores, batch, None if first else old)
        if first and objective.needs_old_logprobs:
            old |= _by_row(micro, scores.logprobs.detach())
        output = policy_loss(tokens, batch.totals, objective)
        output.loss.backward()
        return output.loss.item(), output.metrics

    def _token_batch(
        self,
        micro: MicroBatch,
        scores: TokenScores,
        batch: StepBatch,
        old: Mapping[int, Tensor] | None,
    ) -> TokenBatch:
        device = scores.logprobs.device
        rows = list(micro.rows)
        lengths = torch.tensor([len(c) for c in micro.completions], device=device)

        def flat(by_row: Any) -> Tensor:
            return torch.cat([by_row[row] for row in rows]).to(device, scores.logprobs.dtype)

        return TokenBatch(
            logprobs=scores.logprobs,
            completion=torch.arange(len(rows), device=device).repeat_interleave(lengths),
            advantages=batch.advantages[rows].to(device, scores.logprobs.dtype),
            lengths=lengths,
            old_logprobs=None if old is None else flat(old),
            reference_logprobs=flat(batch.reference_logprobs) if batch.reference_logprobs else None,
            sampler_logprobs=flat(batch.sampler_logprobs),
            entropies=scores.entropies,
            active=batch.active[rows].to(device),
        )

    @torch.no_grad()
    def logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Log-probs of the completions' tokens under the weights as they are, by completion."""
        found: dict[int, Tensor] = {}
        for micro in pack(slices, self.max_tokens):
            found |= _by_row(micro, self.policy.score(micro).logprobs)
        return found

    def reference_logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """The same under the reference policy."""
        self.placement.release()
        with self.reference.in_place(), self.placement.gathered():
            found = self.logprobs(slices)
            self.placement.release()
        return found

    def reference_pass(self, groups: Sequence[Group]) -> tuple[dict[int, Tensor], Tensor | None]:
        """Log-probs under the reference policy by completion, empty where none is kept; and,
        where the KL is taken in the reward, what to subtract from each completion's reward."""
        objective = self.settings.objective
        if not objective.needs_reference:
            return {}, None
        count = sum(len(group.completions) for group in groups)
        slices = build_slices(groups, [True] * count)
        reference = self.reference_logprobs(slices)
        if objective.kl_in == "loss":
            return reference, None
        with self.placement.gathered():
            old = self.logprobs(slices)
        if not count:
            return reference, torch.zeros(0)
        rows = range(len(old))
        lengths = torch.tensor([len(old[row]) for row in rows])
        penalties = kl_penalties(
            torch.cat([old[row] for row in rows]).cpu(),
            torch.cat([reference[row] for row in rows]).cpu(),
            torch.arange(len(rows)).repeat_interleave(lengths),
            len(rows),
            objective.kl_estimator,
        )
        return reference, objective.beta * penalties


def _by_row(micro: MicroBatch, values: Tensor) -> dict[int, Tensor]:
    """Values of the micro-batch's tokens, (M,), as one (T,) tensor for each completion."""
    parts = values.split([len(completion) for completion in micro.completions])
    return dict(zip(micro.rows, parts, strict=True))
