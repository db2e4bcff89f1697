"""The groups of a step, their advantages, and its batch, which has the inputs of the loss."""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch, find_trunks, pack
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.training.objective.advantages import (
    Advantages,
    StepEstimator,
    group_advantages,
    per_reward_advantages,
    step_advantages,
)
from vlm_grpo.training.objective.token_batch import TokenBatch
from vlm_grpo.types import Completion, Group, Prompt, Score

logger = logging.getLogger(__name__)

Values = Mapping[str, Tensor]
"""Values of the T tokens of a step's completions by name, (T, …), on the host or the device."""

_TOKEN_FIELDS = {field.name for field in fields(TokenBatch)}


@dataclass(frozen=True)
class TokenLayout:
    """Where the T tokens of n completions are in flat tensors: one completion after the other."""

    lengths: np.ndarray  # (n,) number of tokens of each completion

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Self:
        return cls(np.array(lengths, dtype=np.int64))

    @cached_property
    def starts(self) -> np.ndarray:
        """(n + 1,) index of each completion's first token, then T."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    def index(self, rows: Sequence[int]) -> Tensor:
        """Return the indices, (M,), of the tokens of some completions."""
        chosen = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[chosen]
        offsets = self.starts[chosen] - (np.cumsum(lengths) - lengths)
        return torch.from_numpy(offsets.repeat(lengths) + np.arange(lengths.sum()))

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split(self.lengths.tolist())


@dataclass(frozen=True)
class KeptGroup:
    """A group of an earlier step without its prompt, which is loaded from the data again."""

    index: int
    step: int  # number of steps done before it was sampled
    completions: tuple[Completion, ...]  # with log-probs of the policy of that step
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Rollout:
    """The groups of one step on this rank."""

    groups: tuple[Group, ...]
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # in the step, by name
    resampled: int = 0  # groups of all ranks sampled in place of those with equal rewards
    num_tokens: int = 0  # number of tokens that this rank sampled
    step: int = 0  # number of steps done before it
    # number, from 0, of the mini-batch of each group, then of each recalled one; empty: all in one
    mini_batches: tuple[int, ...] = ()
    # name of the method that wrote the completions, which have no rewards then; None: sampled
    author: str | None = None
    recalled: tuple[Group, ...] = ()  # of earlier steps, on which the update trains once more
    metrics: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def completions(self) -> tuple[Completion, ...]:
        """The n completions, those of recalled groups last."""
        groups = (*self.groups, *self.recalled)
        return tuple(completion for group in groups for completion in group.completions)

    @property
    def num_sampled(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @cached_property
    def layout(self) -> TokenLayout:
        return TokenLayout.of([len(c.token_ids) for c in self.completions])

    @cached_property
    def sampler_logprobs(self) -> Tensor:
        """(T,) log-probs of the tokens when they were sampled."""
        return torch.tensor([value for c in self.completions for value in c.logprobs])


@dataclass(frozen=True)
class StepAdvantages:
    """The advantages of a step's completions."""

    own: Tensor  # (n,) advantages of this rank's completions, those of recalled groups last
    step: Advantages  # of all ranks' sampled completions, with the statistics of the groups
    # (T,) advantages of the tokens of this rank's completions, if they differ within a completion
    tokens: Tensor | None = None


class _Rewarded(NamedTuple):
    """What the advantages of one rank's n completions depend on."""

    rewards: Tensor  # (n, k)
    lengths: list[list[int]]  # number of tokens of each completion, by group
    penalties: Tensor | None  # KL penalties of all their tokens; None: there are none


def compute_advantages(
    rollout: Rollout,
    scores: Values,
    objective: ObjectiveSettings,
    estimator: StepEstimator | None,
    accelerator: Accelerator,
) -> StepAdvantages:
    """Compute the advantages of a step's completions from the rewards of all ranks.

    Those of recalled groups are computed separately. ``penalties`` among the scores are subtracted
    from the total rewards. ``estimator`` computes them from all groups; None: from each group.
    """
    if rollout.author is not None:
        ones = torch.ones(rollout.num_sampled)
        none = torch.zeros(0)
        return StepAdvantages(ones, Advantages(ones, none, none.bool(), ones > 0))
    rank, own = accelerator.process_index, list[_Rewarded]()
    penalties = scores.get("penalties")
    for groups, known in ((rollout.groups, penalties), (rollout.recalled, None)):
        rewards, weights = get_rewards(groups, rollout.reward_weights)
        lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
        own.append(_Rewarded(rewards, lengths, known))
    pairs = []
    for parts in zip(*gather_object([own]), strict=True):  # sampled, then recalled, by rank
        start = sum(len(part.rewards) for part in parts[:rank])
        rows = slice(start, start + len(parts[rank].rewards))
        if not pairs or any(len(part.rewards) for part in parts):
            pairs.append((_estimate(parts, weights, objective, estimator), rows))
    step = pairs[0][0]
    values = torch.cat([found.values[rows] for found, rows in pairs])
    if step.tokens is None:
        return StepAdvantages(values, step)
    tokens = [part for found, rows in pairs for part in (found.tokens or ())[rows]]
    return StepAdvantages(values, step, torch.cat([*tokens, torch.zeros(0)]))


def _estimate(
    parts: Sequence[_Rewarded],
    weights: Tensor,
    objective: ObjectiveSettings,
    estimator: StepEstimator | None,
) -> Advantages:
    """Compute the advantages of the completions of all ranks; ``weights`` (k,) of the rewards."""
    name = objective.advantage_estimator
    rewards = torch.cat([part.rewards for part in parts])
    sizes = [lengths for part in parts for lengths in part.lengths]
    ids = [number for number, lengths in enumerate(sizes) for _ in lengths]
    lengths = list(itertools.chain(*sizes))
    known = [part.penalties for part in parts if part.penalties is not None]
    penalties = torch.cat(known).split(lengths) if known else None
    if estimator is not None:
        counts = torch.tensor(lengths, dtype=torch.int64)
        found = step_advantages(rewards @ weights, ids, counts, estimator, penalties)
    else:
        if penalties is not None:
            sums = [penalty.sum().to(rewards.dtype) for penalty in penalties]
            rewards = torch.cat([rewards, torch.stack(sums)[:, None]], dim=1)
            weights = torch.cat([weights, weights.new_tensor([-1.0])])
        if objective.normalize_each_reward:
            found = per_reward_advantages(rewards, weights, ids, estimator=name)
        else:
            scale = objective.scale_rewards
            found = group_advantages(rewards @ weights, ids, estimator=name, scale_rewards=scale)
    if (bound := objective.advantage_clip) is None:
        return found
    tokens = found.tokens and tuple(part.clamp(-bound, bound) for part in found.tokens)
    return replace(found, values=found.values.clamp(-bound, bound), tokens=tokens)


def has_spread(
    group: Group, reward_weights: Mapping[str, float], objective: ObjectiveSettings
) -> bool:
    """Return whether the group's rewards give its completions advantages of their own."""
    rewards, weights = get_rewards([group], reward_weights)
    ids = [0] * len(rewards)
    if objective.normalize_each_reward:
        return not per_reward_advantages(rewards, weights, ids).zero_spread.any()
    return not group_advantages(rewards @ weights, ids).zero_spread.any()


def get_rewards(
    groups: Sequence[Group], reward_weights: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """Return the groups' rewards, (n, k), NaN where undefined, and their weights, (k,)."""
    names = [name for name, weight in reward_weights.items() if weight]
    scores = [score for group in groups for score in group.scores]
    # A reward of another source of a mixture adds nothing.
    found = [[score.rewards.get(name, 0.0) for name in names] for score in scores]
    rewards = [[math.nan if value is None else value for value in row] for row in found]
    weights = torch.tensor([reward_weights[name] for name in names], dtype=torch.float32)
    return torch.tensor(rewards, dtype=torch.float32).reshape(len(scores), len(names)), weights


@dataclass(frozen=True)
class StepBatch:
    """The n completions of a step on this rank, with the inputs of the loss."""

    # the completions with a gradient, by group, in parts that have an update each
    mini_batches: tuple[tuple[GroupSlice, ...], ...]
    layout: TokenLayout  # the places of the T tokens in ``values``
    advantages: Tensor
    active: Tensor  # (n,) False for a truncated completion that is masked out
    # (n,) weight of each completion's tokens in each term of the loss, by the term's name, with the
    # normalizer over all ranks included. With m mini-batches, the weights are m times those of the
    # step, so that the mean of the mini-batches' gradients is the step's, as in TRL
    weights: Mapping[str, Tensor]
    values: Values  # of the tokens, by their field in ``TokenBatch`` or its ``scores``
    num_iterations: int = 1
    # index of recalled groups' first token, whose old log-probs are the sampler's; None: no groups
    recalled: int | None = None
    # (n,) True for a completion sampled behind another form of its prompt; None: there is none
    behind_variant: Tensor | None = None
    is_written: bool = False  # whether the completions are targets that a method wrote
    scored: Tensor | None = None  # (T,) log-probs before the update, if a method has scored them

    @property
    def num_updates(self) -> int:
        return len(self.mini_batches) * self.num_iterations

    @property
    def slices(self) -> tuple[GroupSlice, ...]:
        return tuple(piece for part in self.mini_batches for piece in part)

    def select(self, micro: MicroBatch, device: torch.device) -> SelectedTokens:
        """Send the inputs of the loss of a micro-batch's tokens that are known before its pass.

        Copies of pageable memory, and shapes that are read from the device, would wait for the
        forward pass if they came after it.
        """
        rows = list(micro.rows)
        lengths, index = self.layout.lengths[rows], self.layout.index(rows)
        completion = torch.from_numpy(np.arange(len(rows)).repeat(lengths))
        sent = copy_to(device, index)
        of_tokens = {
            name: copy_to(device, values[index]) if values.device.type == "cpu" else values[sent]
            for name, values in self.values.items()
        }
        weights = {name: values[rows][completion] for name, values in self.weights.items()}
        of_completions = {
            "completion": completion,
            "lengths": lengths,
            "advantages": self.advantages[rows],
            "active": self.active[rows],
        }
        if self.behind_variant is not None:
            of_completions["behind_variant"] = self.behind_variant[rows]
        return SelectedTokens(
            sent,
            of_tokens | {name: copy_to(device, part) for name, part in of_completions.items()},
            {name: copy_to(device, values) for name, values in weights.items()},
        )


@dataclass(frozen=True)
class SelectedTokens:
    """The inputs of the loss of the M tokens of a micro-batch, on the policy's device."""

    index: Tensor  # (M,) indices in the flat tensors of the step
    inputs: dict[str, Tensor]  # fields of ``TokenBatch``, and values for its ``scores``, by name
    weights: dict[str, Tensor]  # (M,) weights by term

    def join(self, scores: TokenScores, old: Tensor | None) -> TokenBatch:
        """Return the inputs of the loss, without waiting for the device. ``old`` has the (T,)
        log-probs of the step's tokens before its first update; None: they are the policy's.
        """
        dtype = scores.logprobs.dtype
        found = self.inputs if old is None else {**self.inputs, "old_logprobs": old[self.index]}
        found = {n: x.to(dtype) if x.is_floating_point() else x for n, x in found.items()}
        given: dict[str, Any] = {n: x for n, x in found.items() if n in _TOKEN_FIELDS}
        return TokenBatch(
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            candidate_logprobs=scores.others,
            is_top=scores.is_top,
            weights={name: values.to(dtype) for name, values in self.weights.items()},
            scores={name: x for name, x in found.items() if name not in _TOKEN_FIELDS},
            **given,
        )


def score_groups(
    scorer: RewardScorer,
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, ...]],
) -> list[Group]:
    pairs = list(zip(prompts, completions, strict=True))
    texts = [completion.text for _, members in pairs for completion in members]
    examples = [prompt.example for prompt, members in pairs for _ in members]
    lengths = [len(completion.token_ids) for _, members in pairs for completion in members]
    numbers = [number for number, (_, members) in enumerate(pairs) for _ in members]
    turns = [completion.turns for _, members in pairs for completion in members]
    scores = iter(scorer(task, texts, examples, lengths, numbers, turns))
    return [
        Group(prompt, members, tuple(itertools.islice(scores, len(members))))
        for prompt, members in pairs
    ]


def is_masked(completion: Completion, objective: ObjectiveSettings) -> bool:
    is_truncated = completion.stop == "length" and objective.mask_truncated_completions
    return is_truncated or completion.stop == "turns"


@torch.no_grad()
def score_slices(
    policy: Policy,
    slices: Sequence[GroupSlice],
    layout: TokenLayout,
    max_tokens: int,
    others: Tensor | None = None,
    top_k: int = 0,
) -> TokenScores:
    """Return scores of a step's T tokens, with one pass over each prompt, and of the ``top_k``
    likeliest tokens in their places.

    ``others`` (T,) are the log-probs of the completions that are not in the slices; None: 0.
    """
    batches = pack(slices, max_tokens)
    start = copy_to(policy.device, torch.zeros(layout.total) if others is None else others)
    if not batches:
        return TokenScores(start)
    found = TokenScores.join([policy.score(micro, top_k=top_k) for micro in batches])
    index = copy_to(policy.device, layout.index([row for micro in batches for row in micro.rows]))
    *_, others, is_top, likeliest = (
        None if c is None else c.new_zeros(layout.total, *c.shape[1:]).index_copy(0, index, c)
        for c in found.columns[1:]
    )
    start = start.to(found.logprobs.dtype).index_copy(0, index, found.logprobs)
    return TokenScores(start, None, others, is_top, likeliest)


def build_slices(groups: Sequence[Group], keep: Sequence[bool]) -> tuple[GroupSlice, ...]:
    """Build slices of the completions whose flag in ``keep``, (n,) over all groups in order, is
    True; groups without any are left out. Completions of a trunk are neighbors: few are cut apart.
    """
    slices, start = [], 0
    for group in groups:
        pairs = enumerate(group.completions, start)
        own = [(row, c) for row, c in pairs if keep[row]]
        if own:
            forked = tuple(c.trunk for _, c in own if c.trunk is not None)
            observed = any(c.observations for _, c in own)
            trunks = forked or (() if observed else find_trunks([c.token_ids for _, c in own]))
            if trunks:
                trunks, own = zip(
                    *sorted(zip(trunks, own, strict=True), key=operator.itemgetter(0)), strict=True
                )
            rows, every = zip(*own, strict=True)
            tokens, seen = zip(*((c.token_ids, c.observations) for c in every), strict=True)
            slices.append(GroupSlice(group.prompt, tokens, rows, seen if observed else (), trunks))
        start += len(group.completions)
    return tuple(slices)


def estimate_cost(
    group: Group, reward_weights: Mapping[str, float], settings: Settings, shared: bool
) -> int:
    """Estimate the tokens of a group in forward passes after its rollout; with ``shared``, its
    completions share one pass of their prompt.
    """
    objective = settings.objective
    is_skipped = settings.can_skip_zero_advantages and objective.beta == 0
    is_skipped = is_skipped and not has_spread(group, reward_weights, objective)
    active = [not (is_skipped or is_masked(c, objective)) for c in group.completions]

    def count(keep: Sequence[bool]) -> int:
        repeated = 0 if shared else max(0, sum(keep) - 1) * len(group.prompt.token_ids)
        pieces = build_slices([group], keep)
        if not shared:
            pieces = tuple(replace(piece, trunks=()) for piece in pieces)
        return repeated + sum(piece.num_tokens for piece in pieces)

    references = objective.needs_reference * (2 if objective.kl_in == "reward" else 1)
    updates = objective.num_iterations * 3  # a backward pass costs two forward passes
    return references * count([True] * len(active)) + updates * count(active)
