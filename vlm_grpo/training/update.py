"""The passes and gradient steps on a step's completions."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.optim import DEFAULT_UPDATE_TOKENS
from vlm_grpo.config.policy import Checkpointing
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.dist.strategy import Strategy, build_strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.activations import (
    enable_gradient_checkpointing,
    offload_activations,
    recompute_more,
)
from vlm_grpo.model.engine.packing import MicroBatch, pack
from vlm_grpo.model.families.family import ImageFeatures, Unit
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.planning.memory import ENOUGH_TOKENS, UPDATE_TOKENS
from vlm_grpo.training.learning_rate import build_scheduler
from vlm_grpo.training.memory_probe import MemoryProbe
from vlm_grpo.training.methods import Method, Passes, overrides
from vlm_grpo.training.objective.custom import load_surrogate
from vlm_grpo.training.objective.losses import Surrogate, completion_weights, compute_loss
from vlm_grpo.training.objective.token_batch import MetricAccumulator, StepTotals
from vlm_grpo.training.out_of_memory import TokenBudget, is_out_of_memory
from vlm_grpo.training.step_batch import (
    Rollout,
    StepAdvantages,
    StepBatch,
    Values,
    build_slices,
    is_masked,
    score_slices,
)

logger = logging.getLogger(__name__)


@dataclass
class Updater:
    """The updater of the policy, which also scores completions in passes without gradient."""

    strategy: Strategy  # distributes the policy's weights over ranks, and holds the optimizer
    scheduler: Any  # the learning-rate schedule, advanced once per step
    settings: Settings
    budget: TokenBudget  # maximum number of tokens per micro-batch
    # opens a context that moves the activations saved inside to the host
    offload: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    surrogate: Surrogate | None = None  # the user's loss; None: that of the settings' loss type
    methods: Mapping[str, Method] = field(default_factory=dict)
    # what is recomputed, where more may be when memory runs out; None: that is not changed
    recomputed: Checkpointing | None = None
    probe: MemoryProbe | None = None  # what finds ``budget``; None: it is given

    @property
    def policy(self) -> Policy:
        return self.strategy.policy

    def _find(self, hook: str) -> list[Method]:
        return [method for method in self.methods.values() if overrides(method, hook)]

    def score(self, rollout: Rollout) -> Values:
        """Score the completions in the passes that the methods need besides the update's."""
        if rollout.author is not None:
            return {}
        for method in self.methods.values():
            method.begin(rollout, self.scheduler)
        scoring, values = self._find("score"), dict[str, Tensor]()
        if scoring:
            every = (*rollout.groups, *rollout.recalled)
            slices = build_slices(every, [True] * len(rollout.completions))
            passes = Passes(rollout, slices, self.strategy, self.budget.limit)
        for method in scoring:
            with self.policy.stopwatch(method.phase or method.name):
                values |= method.score(passes)
        found = [method.weigh_tokens(rollout, values) for method in self.methods.values()]
        given = [factors for factors in found if factors is not None]
        if given:
            values["token_factors"] = functools.reduce(torch.mul, given)
        return values

    def update(self, batch: StepBatch) -> dict[str, float]:
        """Make the updates of a step; return their metrics over all ranks. All ranks call it."""
        losses, norms, metrics = list[float](), list[float](), MetricAccumulator()
        readers = [] if batch.is_written else self._find("read_features")
        watched: list[dict[Unit, ImageFeatures]] = [{} for _ in range(batch.num_updates)]
        with self.policy.stopwatch("update"):
            self.policy.model.train()
            if self.probe is not None:
                given = self.settings.policy.gradient_checkpointing
                used = self.recomputed or ("full" if given == "auto" else given)
                self.probe.begin(batch, used, self._least_tokens)
            old = self._start_old(batch)
            for number in range(batch.num_updates):
                with self.strategy.accumulate():
                    features = watched[number] if readers else None
                    parts, more = self._accumulate(batch, number, old, features)
                norms.append(self.strategy.step())
                if self.probe is not None:
                    self.probe.end(self._least_tokens)
                losses.append(sum(torch.stack(parts).tolist()) if parts else 0.0)
                metrics = metrics + more
            skipped = sum(not math.isfinite(norm) for norm in norms)
            if skipped < len(norms):
                self.scheduler.step()
        loss, found = sum_metrics(sum(losses), metrics)
        for method in readers:
            found |= method.read_features(watched)
        if self.probe is not None:
            found["memory/max_tokens_per_batch"] = self.budget.limit
        return {
            "loss": loss / len(norms),
            "grad_norm": norms[-1],
            "skipped_updates": skipped,
            **found,
        }

    def _start_old(self, batch: StepBatch) -> Tensor | None:
        """Return the (T,) log-probs before the first update, in which the first update fills in
        those of its tokens; None if they are the policy's own throughout."""
        if batch.num_updates == 1 and batch.recalled is None:
            return None
        dtype = torch.promote_types(self.policy.model.dtype, torch.float32)
        sampled = batch.values["sampler_logprobs"]  # what recalled groups keep
        old = copy_to(self.policy.device, sampled).to(dtype, copy=True)
        end = batch.layout.total if batch.recalled is None else batch.recalled
        if batch.scored is not None:
            old[:end] = batch.scored[:end]
        elif len(batch.mini_batches) > 1:
            later = [piece for part in batch.mini_batches[1:] for piece in part]
            own = [piece for piece in later if batch.layout.starts[piece.rows[0]] < end]
            with self.strategy.gathered():
                old = score_slices(self.policy, own, batch.layout, self.budget.limit, old).logprobs
        return old

    def _accumulate(
        self,
        batch: StepBatch,
        number: int,
        old: Tensor | None,
        watched: dict[Unit, ImageFeatures] | None = None,
    ) -> tuple[list[Tensor], MetricAccumulator]:
        """Accumulate the gradient of an update of the step; return its metrics, and the losses of
        its micro-batches. The features of its images are added to ``watched``.

        If memory runs out, the update is repeated with micro-batches of half the size, or with more
        that is recomputed, which gives the same gradient.
        """
        slices = batch.mini_batches[number % len(batch.mini_batches)]
        measure = contextlib.nullcontext if self.probe is None else self.probe.measure
        while True:
            batches, micro = pack(slices, self.budget.limit), None
            try:
                losses, metrics = list[Tensor](), MetricAccumulator()
                shared = self.policy.engine.share_image_passes(watched)
                with measure(batches), shared as finish:
                    for count, micro in enumerate(self.strategy.passes(batches), 1):
                        if micro is None:
                            self.strategy.dummy_loss().backward()
                            continue
                        loss, more = self._backward(micro, batch, number, old)
                        losses.append(loss)
                        metrics = metrics + more
                        finish({image for later in batches[count:] for image in later.images})
                return losses, metrics
            except RuntimeError as error:
                if micro is None or not is_out_of_memory(error):
                    raise
                # Where smaller micro-batches are no better, more is recomputed if it may be.
                is_small = micro.num_tokens < 2 * ENOUGH_TOKENS or len(micro.rows) == 1
                recomputes = is_small and self.recomputed in ("none", "mlp")
                if not recomputes:
                    self._check_can_halve(micro, error)
            self.strategy.drop_gradients()
            self.policy.engine.release()
            if recomputes:
                self._recompute_more()
            else:
                self.budget.halve(micro.num_tokens)
            if watched is not None:
                watched.clear()

    @property
    def _least_tokens(self) -> int:
        """The number of tokens below which a micro-batch's layers are rather recomputed."""
        return ENOUGH_TOKENS if self.recomputed in ("none", "mlp") else UPDATE_TOKENS[0]

    def _recompute_more(self) -> None:
        assert self.recomputed is not None
        self.recomputed = recompute_more(self.policy.model, self.recomputed)
        logger.warning(
            "out of memory: recomputing activations from now on; set "
            "policy.gradient_checkpointing=%s to start with this value",
            self.recomputed,
        )

    def _check_can_halve(self, micro: MicroBatch, error: RuntimeError) -> None:
        if len(micro.rows) == 1:
            raise UserError(
                f"out of memory on a single completion of {micro.num_tokens} tokens: lower "
                "policy.max_pixels, set policy.gradient_checkpointing=full, or train LoRA"
            ) from error
        if not self.strategy.may_retry:
            raise UserError(
                f"process {self.strategy.accelerator.process_index}: out of memory on a "
                f"micro-batch of {micro.num_tokens} tokens; ranks with "
                "sharded weights cannot repeat a step independently: continue with "
                f"resume=true optim.max_tokens_per_batch={micro.num_tokens // 2}"
            ) from error

    def _backward(
        self, micro: MicroBatch, batch: StepBatch, number: int, old: Tensor | None
    ) -> tuple[Tensor, MetricAccumulator]:
        """Backpropagate the loss of a micro-batch; in the first update, also keep its log-probs.

        Nothing waits for the device, so that it runs one pass while the next is prepared.
        """
        objective = self.settings.objective
        selected = batch.select(micro, self.policy.device)
        with self.offload():
            with_entropy = objective.entropy_coef != 0 and not batch.is_written
            others = selected.inputs.get("candidates")
            scores = self.policy.score(micro, with_entropy, batch.is_written, others)
        if number == 0 and old is not None:
            index, now = selected.index, scores.logprobs.detach().to(old.dtype)
            if batch.recalled is not None:
                now = torch.where(index < batch.recalled, now, old[index])
            old[index] = now
        has_ratio = number > 0 or batch.recalled is not None
        tokens = selected.join(scores, old if has_ratio else None)
        output = compute_loss(tokens, objective, self.surrogate, self.methods)
        output.loss.backward()
        return output.loss.detach(), output.metrics


def pack_step(
    rollout: Rollout,
    scores: Values,
    advantages: StepAdvantages,
    methods: Mapping[str, Method],
    settings: Settings,
) -> StepBatch:
    """Pack a step's completions, with values of their tokens, into the batch of its update."""
    objective, author, layout = settings.objective, rollout.author, rollout.layout
    groups, own = (*rollout.groups, *rollout.recalled), advantages.own
    lengths = torch.from_numpy(layout.lengths)
    masked = [is_masked(completion, objective) for completion in rollout.completions]
    active = ~torch.tensor(masked, dtype=torch.bool)
    totals = StepTotals.from_lengths(lengths, active, settings.rollout.max_completion_length)
    every = gather_object([(totals.completions, totals.active_tokens)])
    completions, tokens = (sum(column) for column in zip(*every, strict=True))
    totals = StepTotals(completions, tokens, totals.max_completion_length)
    if author is not None:  # a mean over the tokens
        weights = {author: torch.ones(len(lengths)) / max(totals.active_tokens, 1)}
    else:
        weights = completion_weights(lengths, active, totals, objective, methods)
    for name in weights.keys() & methods.keys():
        covered = [methods[name].covers(group) for group in groups for _ in group.completions]
        weights[name] = weights[name] * torch.tensor(covered, dtype=weights[name].dtype)
    apart = "penalties", "old_logprobs"
    values = {name: part for name, part in scores.items() if name not in apart}
    values["sampler_logprobs"] = rollout.sampler_logprobs
    signal = own
    if advantages.tokens is not None:
        values["token_advantages"] = advantages.tokens
        signal = torch.stack([part.abs().max() for part in layout.split(advantages.tokens)])
    # The totals count those without a gradient, so that the others' gradients stay the same.
    keep = active & (signal != 0) if settings.can_skip_zero_advantages else active
    count = 1 if author is not None else settings.optim.mini_batches
    numbers = rollout.mini_batches or (0,) * len(groups)
    sizes = [len(group.completions) for group in groups]
    parts = [part for part, size in zip(numbers, sizes, strict=True) for _ in range(size)]
    behind = [completion.variant is not None for completion in rollout.completions]
    return StepBatch(
        tuple(
            build_slices(
                groups, [k and p == part for k, p in zip(keep.tolist(), parts, strict=True)]
            )
            for part in range(count)
        ),
        layout,
        own,
        active,
        {name: weight * count for name, weight in weights.items()},
        values,
        1 if author is not None else objective.num_iterations,
        int(layout.starts[rollout.num_sampled]) if rollout.recalled else None,
        torch.tensor(behind) if any(behind) else None,
        author is not None,
        scores.get("old_logprobs"),
    )


def sum_metrics(loss: float, metrics: MetricAccumulator) -> tuple[float, dict[str, float]]:
    """Return the loss and the metrics of a step over all ranks. All ranks must call it."""
    every = gather_object([(loss, metrics.cpu())])
    found = sum((metrics for _, metrics in every), MetricAccumulator()).values()
    square = found.pop("sampling/importance_sampling_ratio/mean_square", 0.0)
    if square:  # the share of weights of 1 with the same variance of a mean (Kish 1965)
        mean = found["sampling/importance_sampling_ratio/mean"]
        found["sampling/effective_sample_size"] = mean**2 / square
    return sum(loss for loss, _ in every), found


def build_updater(
    policy: Policy,
    settings: Settings,
    accelerator: Accelerator,
    methods: Mapping[str, Method] = MappingProxyType({}),
) -> Updater:
    """Distribute the policy over the ranks, and build its optimizer and schedule."""
    strategy = build_strategy(policy, accelerator)
    optimizer = build_optimizer(strategy.trainable, settings.optim, settings.seed)
    strategy.attach_optimizer(optimizer, settings.optim.max_grad_norm or math.inf)
    offload: Any = contextlib.nullcontext
    if settings.policy.activation_offloading:
        _check_offloading(strategy)
        offload = functools.partial(offload_activations, policy.model, policy.device)
    is_automatic = settings.policy.gradient_checkpointing == "auto"
    if is_automatic and not strategy.may_retry:
        enable_gradient_checkpointing(policy.model, "full")
    given, device = settings.optim.max_tokens_per_batch, accelerator.device
    budget = TokenBudget(given or DEFAULT_UPDATE_TOKENS, "optim.max_tokens_per_batch")
    budget.is_found = given is not None or device.type != "cuda"
    return Updater(
        strategy,
        build_scheduler(optimizer, settings),
        settings,
        budget,
        offload,
        load_surrogate(settings.objective),
        methods,
        "none" if is_automatic and strategy.may_retry else None,
        None if budget.is_found else MemoryProbe(budget, strategy, settings, device),
    )


def _check_offloading(strategy: Strategy) -> None:
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
