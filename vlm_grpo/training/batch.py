"""The groups of a step, and its batch: their completions with the inputs of the loss."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import sum_over_ranks
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.training.methods import find_methods
from vlm_grpo.training.objective import StepTotals, TokenBatch, completion_weights, needs_update
from vlm_grpo.types import Completion, Group, Prompt

_TOKEN_FIELDS = {field.name for field in fields(TokenBatch)}


@dataclass(frozen=True)
class Rollout:
    """The groups of one step on this rank.

    Attributes:
        groups: the scored groups.
        resampled: number of groups, over all ranks, that were sampled to replace groups whose
            rewards were all equal.
        rounds: for each round of sampling, the stream's indices that this rank sampled, including
            indices of replaced groups; then those of the groups that it got from other ranks, and
            of replayed ones.
        num_tokens: number of tokens that this rank sampled.
        step: number of steps done before it.
        mini_batches: the number, from 0, of the mini-batch of each group, then of each replayed
            one; empty: all are in one.
        is_supervised: whether the completions are targets, written instead of sampled, which have
            no rewards.
        replayed: groups of earlier steps, on which the update trains once more.
        metrics: metrics of the choice of its prompts and of the replay, over all ranks.
    """

    groups: tuple[Group, ...]
    resampled: int = 0
    rounds: tuple[tuple[int, ...], ...] = ()
    num_tokens: int = 0
    step: int = 0
    mini_batches: tuple[int, ...] = ()
    is_supervised: bool = False
    replayed: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepScores:
    """Scores of a step's n completions from extra passes.

    Attributes:
        values: (T,) values of the tokens of each completion, by the name of their field in
            ``TokenBatch``, or the name in its ``scores``.
        penalties: (T,) KL penalties of the tokens of each completion, to subtract from the
            rewards; None if there are none.
        old: (T,) log-probs under the policy by completion, if they were computed for the penalties
            and later mini-batches need them.
    """

    values: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    penalties: Sequence[Tensor] | None = None
    old: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepBatch:
    """The n completions of a step on this rank, with the inputs of the loss.

    Attributes:
        mini_batches: the parts of the step, each with an update of its own: the completions that
            have a gradient, by group.
        advantages: (n,) advantage of each completion.
        active: (n,) False for a truncated completion that is masked out.
        sampler_logprobs: for each completion, (T,) log-probs of its tokens when sampled.
        weights: (n,) weight of each completion's tokens in each term of the loss, by the term's
            name, with the normalizer over all ranks included. With m mini-batches, the weights are
            m times those of the step, so that the mean of the mini-batches' gradients is the
            step's, as in TRL.
        values: as in ``StepScores``.
        num_iterations: number of updates on each mini-batch.
        replayed: the completions of replayed groups; their old log-probs are the sampler's.
        noisy: the completions that were sampled behind images with noise.
    """

    mini_batches: tuple[tuple[GroupSlice, ...], ...]
    advantages: Tensor
    active: Tensor
    sampler_logprobs: tuple[Tensor, ...]
    weights: Mapping[str, Tensor]
    values: Mapping[str, Mapping[int, Tensor]]
    num_iterations: int = 1
    replayed: range = range(0)
    noisy: frozenset[int] = frozenset()

    @property
    def num_updates(self) -> int:
        """Number of updates of the step."""
        return len(self.mini_batches) * self.num_iterations

    @property
    def is_supervised(self) -> bool:
        """Whether the completions are targets."""
        return "cross_entropy" in self.weights

    @property
    def slices(self) -> tuple[GroupSlice, ...]:
        """The completions of all mini-batches that have a gradient, by group."""
        return tuple(piece for part in self.mini_batches for piece in part)


def score_groups(
    scorer: RewardScorer,
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, ...]],
) -> list[Group]:
    """Score the completions of each prompt."""
    pairs = list(zip(prompts, completions, strict=True))
    texts = [completion.text for _, members in pairs for completion in members]
    examples = [prompt.example for prompt, members in pairs for _ in members]
    lengths = [len(completion.token_ids) for _, members in pairs for completion in members]
    numbers = [number for number, (_, members) in enumerate(pairs) for _ in members]
    scores = iter(scorer(task, texts, examples, lengths, numbers))
    return [
        Group(prompt, members, tuple(itertools.islice(scores, len(members))))
        for prompt, members in pairs
    ]


def is_masked(completion: Completion, objective: ObjectiveSettings) -> bool:
    """Return whether the completion is left out of the loss, as a truncated one may be."""
    return objective.mask_truncated_completions and completion.stop == "length"


def by_completion(micro: MicroBatch, values: Tensor) -> dict[int, Tensor]:
    """Split values of the micro-batch's tokens, (M,), into one (T,) tensor per completion."""
    parts = values.split([len(completion) for completion in micro.completions])
    return dict(zip(micro.rows, parts, strict=True))


def copy_to_host(by_row: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy (T,) values by completion to host memory, with one read from the device."""
    if not by_row:
        return {}
    joined = torch.cat([*by_row.values()]).cpu()
    parts = joined.split([len(values) for values in by_row.values()])
    return dict(zip(by_row, parts, strict=True))


def send_inputs(micro: MicroBatch, batch: StepBatch, device: torch.device) -> dict[str, Any]:
    """Send the inputs of the loss of a micro-batch's tokens that are known before its pass.

    Copies of pageable memory, and shapes that are read from the device, would wait for the forward
    pass if they came after it.

    Args:
        micro: the micro-batch.
        batch: the step's batch.
        device: the policy's device.

    Returns:
        Fields of ``TokenBatch`` by name.
    """
    rows, lengths = list(micro.rows), np.array([len(tokens) for tokens in micro.completions])
    completion = np.arange(len(rows)).repeat(lengths)
    by_token = {"sampler_logprobs": batch.sampler_logprobs, **batch.values}
    inputs = {
        "completion": completion,
        "lengths": lengths,
        "advantages": batch.advantages[rows],
        "active": batch.active[rows],
        **{name: _flatten(by_row, rows, device) for name, by_row in by_token.items() if by_row},
    }
    if batch.noisy:
        inputs["noisy"] = np.array([row in batch.noisy for row in rows])
    weights = {name: values[rows][completion] for name, values in batch.weights.items()}
    return {
        **{name: copy_to(device, values) for name, values in inputs.items()},
        "weights": {name: copy_to(device, values) for name, values in weights.items()},
    }


def _flatten(by_row: Any, rows: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of the rows' tokens, (M,), on the host only if all are there."""
    parts = [by_row[row] for row in rows]
    if len({part.device for part in parts}) > 1:
        parts = [copy_to(device, part) for part in parts]
    return torch.cat(parts)


def build_token_batch(
    micro: MicroBatch,
    scores: TokenScores,
    inputs: Mapping[str, Any],
    old: Mapping[int, Tensor] | None,
) -> TokenBatch:
    """Build the inputs of the loss for a micro-batch's tokens, without waiting for the device.

    Args:
        micro: the micro-batch.
        scores: the policy's log-probs of its tokens.
        inputs: as from ``send_inputs``.
        old: (T,) log-probs before the first update by completion; None if they are the policy's.
    """
    device, dtype = scores.logprobs.device, scores.logprobs.dtype
    found = {} if old is None else {"old_logprobs": _flatten(old, micro.rows, device)}
    found |= {name: values for name, values in inputs.items() if name != "weights"}
    extra = {name: found.pop(name).to(dtype) for name in found.keys() - _TOKEN_FIELDS}
    return TokenBatch(
        scores=extra,
        logprobs=scores.logprobs,
        entropies=scores.entropies,
        is_top=scores.is_top,
        weights={name: values.to(dtype) for name, values in inputs["weights"].items()},
        **{
            name: values.to(dtype) if values.is_floating_point() else values
            for name, values in found.items()
        },
    )


@torch.no_grad()
def score_slices(
    policy: Policy, slices: Sequence[GroupSlice], max_tokens: int
) -> dict[int, Tensor]:
    """Return the (T,) log-probs under a model by completion, with one pass over each prompt.

    Args:
        policy: the model.
        slices: the completions, by group.
        max_tokens: maximum number of tokens per pass.
    """
    logprobs: dict[int, Tensor] = {}
    for micro in pack(slices, max_tokens):
        logprobs |= by_completion(micro, policy.score(micro).logprobs)
    return logprobs


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
    rollout: Rollout,
    advantages: Tensor,
    values: Mapping[str, Mapping[int, Tensor]],
    settings: Settings,
    accelerator: Accelerator,
) -> StepBatch:
    """Pack a step's completions into the batch of its update.

    Args:
        rollout: this rank's groups, n completions in all; those of replayed groups come last.
        advantages: (n,) advantage of each completion.
        values: as in ``StepScores``.
        settings: the run's settings.
        accelerator: the ranks.
    """
    groups = (*rollout.groups, *rollout.replayed)
    completions = [completion for group in groups for completion in group.completions]
    sampled = sum(len(group.completions) for group in rollout.groups)
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    masked = [is_masked(completion, settings.objective) for completion in completions]
    active = ~torch.tensor(masked, dtype=torch.bool)
    own = StepTotals.from_lengths(lengths, active, settings.rollout.max_completion_length)
    # One process alone does not wait for the passes that it queued on its device.
    device = accelerator.device if accelerator.num_processes > 1 else None
    sums = torch.tensor([own.completions, own.active_tokens], device=device)
    sum_over_ranks(accelerator, [sums])
    totals = StepTotals(int(sums[0]), int(sums[1]), own.max_completion_length)
    count = 1 if rollout.is_supervised else settings.optim.mini_batches
    if rollout.is_supervised:
        weights = {"cross_entropy": torch.ones(len(completions)) / max(totals.active_tokens, 1)}
    else:
        weights = completion_weights(lengths, active, totals, settings.objective, find_methods())
    for name in weights.keys() & find_methods().keys():
        covers = find_methods()[name].covers
        covered = [covers(group) for group in groups for _ in group.scores]
        weights[name] = weights[name] * torch.tensor(covered, dtype=torch.float64)
    signal = advantages
    if by_token := values.get("token_advantages"):
        signal = torch.stack([by_token[row].abs().max() for row in range(len(completions))])
    keep = needs_update(signal, active, settings.objective)
    numbers = rollout.mini_batches or (0,) * len(groups)
    sizes = [len(group.completions) for group in groups]
    parts = [part for part, size in zip(numbers, sizes, strict=True) for _ in range(size)]
    return StepBatch(
        tuple(
            build_slices(
                groups, [k and p == part for k, p in zip(keep.tolist(), parts, strict=True)]
            )
            for part in range(count)
        ),
        advantages,
        active,
        tuple(torch.tensor(c.logprobs) for c in completions),
        {name: weight * count for name, weight in weights.items()},
        values,
        1 if rollout.is_supervised else settings.objective.num_iterations,
        range(sampled, len(completions)),
        frozenset(row for row, c in enumerate(completions) if c.noise),
    )
