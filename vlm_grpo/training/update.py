"""The update: gradient steps on a step's completions."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.build import build_strategy
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.activations import offload_activations
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.training.batch import (
    Rollout,
    StepBatch,
    StepScores,
    build_slices,
    build_token_batch,
    by_completion,
    score_slices,
    send_inputs,
)
from vlm_grpo.training.memory import TokenBudget, is_out_of_memory
from vlm_grpo.training.methods import Method, ScoredStep, find_methods, load_methods
from vlm_grpo.training.objective import (
    MetricAccumulator,
    Surrogate,
    compute_loss,
    load_surrogate,
)
from vlm_grpo.training.reference import Reference
from vlm_grpo.training.schedule import build_scheduler, get_rates


@dataclass
class Updates:
    """The updates on the completions of one step.

    Attributes:
        old_logprobs: (T,) log-probs before the first update by completion, of those that have
            later updates; of a replayed one, those of the policy that sampled it.
        losses: loss of each update on this rank.
        norms: gradient norm of each update.
        metrics: loss metrics over all updates on this rank.
    """

    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)

    @property
    def count(self) -> int:
        """Number of updates."""
        return len(self.norms)

    @property
    def skipped(self) -> int:
        """Number of updates that were skipped because their gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.norms)

    def summarize(self) -> dict[str, float]:
        """Return the metrics over all ranks, after the last update. All ranks must call it."""
        every = gather_object([(sum(self.losses), self.metrics.cpu())])
        metrics = sum((metrics for _, metrics in every), MetricAccumulator()).values()
        square = metrics.pop("sampling/importance_sampling_ratio/mean_square", 0.0)
        if square:  # the share of weights of 1 with the same variance of a mean (Kish 1965)
            mean = metrics["sampling/importance_sampling_ratio/mean"]
            metrics["sampling/effective_sample_size"] = mean**2 / square
        return {
            "loss": sum(loss for loss, _ in every) / self.count,
            "grad_norm": self.norms[-1],
            "skipped_updates": self.skipped,
            **metrics,
        }


@dataclass
class Updater:
    """The updater of the policy, which also scores completions under policy and reference.

    Attributes:
        policy: the policy that is trained.
        strategy: distributes its weights over ranks, and holds the optimizer.
        reference: the reference policy.
        scheduler: the learning-rate schedule, advanced once per step.
        settings: the run's settings.
        budget: maximum number of tokens per micro-batch.
        offload: opens a context that moves the activations saved inside to the host.
        surrogate: the user's loss; None: that of the settings' loss type.
        methods: the optional methods that the settings use.
    """

    policy: Policy
    strategy: Strategy
    reference: Reference
    scheduler: Any
    settings: Settings
    budget: TokenBudget
    offload: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    surrogate: Surrogate | None = None
    methods: tuple[Method, ...] = ()

    @property
    def learning_rates(self) -> dict[str, float]:
        """The metrics of the learning rates."""
        return get_rates(self.scheduler)

    # The reference pass.

    def begin_step(self, rollout: Rollout) -> None:
        """Refresh the reference if it is due.

        The first rollout after a warm start starts like a new run: with the current weights as
        the reference, and without a state of the optimizer.
        """
        if rollout.is_supervised:
            return
        done = rollout.step - self.settings.supervised_steps
        if done == 0 < rollout.step:
            self.strategy.reset_optimizer()
            while self.scheduler.last_epoch < rollout.step:  # skipped updates did not advance it
                self.scheduler.step()
            self.reference.copy_policy()
        self.reference.refresh(done)

    def score_step(self, rollout: Rollout) -> StepScores:
        """Score the completions in the passes that the settings need besides the update's."""
        if rollout.is_supervised:
            return StepScores()
        count = sum(len(group.completions) for group in rollout.groups)
        step = ScoredStep(rollout, build_slices(rollout.groups, [True] * count), self)
        values: dict[str, Mapping[int, Tensor]] = {}
        for method in self.methods:
            with self.policy.stopwatch(method.phase):
                values |= method.score(step)
        found = [method.weigh_tokens(rollout, values) for method in self.methods]
        given = [factors for factors in found if factors is not None]
        if given:
            values["token_factors"] = {
                row: functools.reduce(torch.mul, (factors[row] for factors in given))
                for row in range(count)
            }
        kept = step.known_logprobs if self.settings.optim.mini_batches > 1 else {}
        return StepScores(values, step.penalties, kept)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per pass."""
        return self.budget.limit

    def policy_logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Return the (T,) log-probs under the policy by completion. All ranks must call it."""
        with self.strategy.gathered():
            return self.logprobs(slices)

    def reference_logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Return the (T,) log-probs under the reference policy by completion."""
        self.strategy.release()
        with self.reference.in_place(), self.strategy.gathered():
            logprobs = self.logprobs(slices)
            self.strategy.release()
        return logprobs

    def logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Return the (T,) log-probs under the current weights by completion."""
        return score_slices(self.policy, slices, self.budget.limit)

    # The gradient steps.

    def update(self, batch: StepBatch, known: Mapping[int, Tensor] | None = None) -> Updates:
        """Make the updates of a step.

        Args:
            batch: the step's completions.
            known: log-probs before the first update that were computed already, by completion.
        """
        with self.policy.stopwatch("update"):
            self.policy.model.train()
            device, sampled = self.policy.device, batch.sampler_logprobs
            old = {row: copy_to(device, sampled[row]) for row in batch.replayed}
            updates = Updates({**(known or {}), **old})
            updates.old_logprobs |= self._score_later(batch, updates.old_logprobs)
            for _ in range(batch.num_updates):
                self._update_once(batch, updates)
        return updates

    def _score_later(self, batch: StepBatch, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the log-probs that are not known of all mini-batches but the first, whose update
        yields its own."""
        if len(batch.mini_batches) == 1:
            return {}
        later = [piece for part in batch.mini_batches[1:] for piece in part]
        with self.strategy.gathered():
            return self.logprobs([piece for piece in later if piece.rows[0] not in known])

    def _update_once(self, batch: StepBatch, updates: Updates) -> None:
        """Make one update; the last one advances the schedule, unless all were skipped."""
        with self.strategy.accumulate():
            losses, metrics = self._accumulate(batch, updates)
        updates.norms.append(self.strategy.step())
        updates.losses.append(sum(torch.stack(losses).tolist()) if losses else 0.0)
        updates.metrics = updates.metrics + metrics
        is_last = updates.count == batch.num_updates
        if is_last and updates.skipped < updates.count:
            self.scheduler.step()

    def _accumulate(
        self, batch: StepBatch, updates: Updates
    ) -> tuple[list[Tensor], MetricAccumulator]:
        """Accumulate the gradient of the entire update; return its metrics, and the losses of its
        micro-batches.

        If memory runs out, the gradients so far are dropped and the update is repeated with
        micro-batches of half the size, which gives the same gradient.
        """
        slices = batch.mini_batches[updates.count % len(batch.mini_batches)]
        while True:
            batches, micro = pack(slices, self.budget.limit), None
            try:
                losses, metrics = list[Tensor](), MetricAccumulator()
                with self.policy.engine.share_image_passes() as finish:
                    for count, micro in enumerate(self.strategy.passes(batches), 1):
                        if micro is None:
                            self.strategy.dummy_loss().backward()
                            continue
                        loss, more = self._backward(micro, batch, updates)
                        losses.append(loss)
                        metrics = metrics + more
                        finish({image for later in batches[count:] for image in later.images})
                return losses, metrics
            except RuntimeError as error:
                if micro is None or not is_out_of_memory(error):
                    raise
                self._check_can_halve(micro, error)
            self.strategy.drop_gradients()
            self.policy.engine.release()
            self.budget.halve(micro.num_tokens)

    def _check_can_halve(self, micro: MicroBatch, error: RuntimeError) -> None:
        """Check that a step that ran out of memory can be repeated with smaller micro-batches.

        Raises:
            UserError: it cannot be repeated.
        """
        if len(micro.rows) == 1:
            raise UserError(
                f"out of memory on a single completion of {micro.num_tokens} tokens: lower "
                "policy.max_pixels, set policy.gradient_checkpointing=full, or train LoRA"
            ) from error
        if not self.strategy.may_retry:
            raise UserError(
                f"out of memory on a micro-batch of {micro.num_tokens} tokens; ranks with "
                "sharded weights cannot repeat a step independently: continue with "
                f"resume=true optim.max_tokens_per_batch={micro.num_tokens // 2}"
            ) from error

    def _backward(
        self, micro: MicroBatch, batch: StepBatch, updates: Updates
    ) -> tuple[Tensor, MetricAccumulator]:
        """Backpropagate the loss of a micro-batch; in the first update, also keep its log-probs.

        Nothing waits for the device, so that it runs one pass while the next is prepared.
        """
        objective, old = self.settings.objective, updates.old_logprobs
        inputs = send_inputs(micro, batch, self.policy.device)
        with self.offload():
            if batch.is_supervised:
                scores = self.policy.score(micro, supervised=True)
            else:
                scores = self.policy.score(micro, objective.entropy_coef != 0)
        if not updates.count and (batch.num_iterations > 1 or batch.replayed):
            now = by_completion(micro, scores.logprobs.detach())
            old |= {row: logprobs for row, logprobs in now.items() if row not in batch.replayed}
        has_ratio = bool(updates.count or batch.replayed)
        tokens = build_token_batch(micro, scores, inputs, old if has_ratio else None)
        output = compute_loss(tokens, objective, self.surrogate, find_methods())
        output.loss.backward()
        return output.loss.detach(), output.metrics


def build_updater(policy: Policy, settings: Settings, accelerator: Accelerator) -> Updater:
    """Distribute the policy over the ranks, and build its optimizer, schedule and reference."""
    strategy = build_strategy(policy, accelerator)
    optimizer = build_optimizer(strategy.trainable, settings.optim, settings.seed)
    strategy.attach_optimizer(optimizer, settings.optim.max_grad_norm or math.inf)
    offload: Any = contextlib.nullcontext
    if settings.policy.activation_offloading:
        _check_offloading(strategy)
        offload = functools.partial(offload_activations, policy.model, policy.device)
    return Updater(
        policy,
        strategy,
        Reference(strategy.trainable, settings.objective),
        build_scheduler(optimizer, settings),
        settings,
        TokenBudget(settings.optim.max_tokens_per_batch, "optim.max_tokens_per_batch"),
        offload,
        load_surrogate(settings.objective),
        load_methods(settings, policy),
    )


def _check_offloading(strategy: Strategy) -> None:
    """Check that activations can be moved to the host.

    Raises:
        UserError: they cannot.
    """
    if strategy.accelerator.device.type != "cuda":
        raise UserError(
            "policy.activation_offloading moves activations from a GPU to the host's memory, and "
            f"this run computes on {strategy.accelerator.device.type}: remove it"
        )
    if not strategy.may_retry:
        raise UserError(
            "policy.activation_offloading is not possible with sharded weights, which would be "
            "moved as well: remove it, or set policy.gradient_checkpointing=full"
        )
