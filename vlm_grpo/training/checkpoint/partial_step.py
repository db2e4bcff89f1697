"""A step that was sampled but not finished, and its form in a checkpoint.

A run can be stopped between two updates on one rollout. The checkpoint then holds the completions
with their log-probs, rewards and advantages; images and prompts are loaded from the data again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.training.batch import Rollout, StepBatch, pack_step
from vlm_grpo.training.objective import MetricAccumulator
from vlm_grpo.training.rollout import RolloutSampler
from vlm_grpo.training.update import Updates
from vlm_grpo.types import Completion, Group, Prompt, Score

TOKEN_VALUES = {
    "reference": "reference_logprobs",
    "teacher": "teacher_logprobs",
    "masked": "masked_logprobs",
    "token_factors": "token_factors",
    "token_advantages": "token_advantages",
}
"""Fields of ``TokenBatch`` with values of all completions, by their name in a checkpoint."""
LOADER_COUNTERS = ("image_decodes", "replaced_prompts")
"""Fields of ``Counters`` that a checkpoint stores outside ``work``."""


@dataclass
class PartialStep:
    """A step that was sampled but not finished, on this rank.

    Attributes:
        rollout: the groups of this rank.
        batch: the input of the updates.
        metrics: metrics of the rollout over all ranks, by name.
        updates: the updates made so far.
    """

    rollout: Rollout
    batch: StepBatch
    metrics: Mapping[str, float]
    updates: Updates = field(default_factory=Updates)


def serialize_step(
    step: PartialStep, policy: Policy
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Gather a step from all ranks.

    Returns:
        The JSON values of each rank, and the tensors named ``rank/name``.
    """
    values = gather_object([_serialize_values(step, policy)])
    tensors = gather_object([_serialize_tensors(step)])
    return values, {
        f"{rank}/{name}": tensor
        for rank, named in enumerate(tensors)
        for name, tensor in named.items()
    }


def _serialize_values(step: PartialStep, policy: Policy) -> dict[str, Any]:
    """Return the values of this rank's step that are stored as JSON."""
    work, sampled = dict(vars(policy.counters)), len(step.rollout.groups)
    groups = (*step.rollout.groups, *step.rollout.replayed)
    parts = step.rollout.mini_batches if len(step.batch.mini_batches) > 1 else ()
    return {
        "rounds": step.rollout.rounds,
        "resampled": step.rollout.resampled,
        **({"supervised": True} if step.rollout.is_supervised else {}),
        "groups": [
            {
                "id": group.id,
                "prompt_tokens": len(group.prompt.token_ids),
                "completions": serialize_completions(group.completions, group.scores),
                **({} if part is None else {"mini_batch": part}),
                **({"replayed": True} if number >= sampled else {}),
            }
            for number, (group, part) in enumerate(itertools.zip_longest(groups, parts))
        ],
        "metrics": dict(step.metrics),
        "updates": step.updates.count,
        "losses": step.updates.losses,
        "norms": step.updates.norms,
        "old_rows": sorted(step.updates.old_logprobs),
        **{name: work.pop(name) for name in LOADER_COUNTERS},
        "work": work,
    }


def serialize_completions(
    completions: Sequence[Completion], scores: Sequence[Score]
) -> list[dict[str, Any]]:
    """Return the values of completions that JSON can hold; ``join_tokens`` has the others."""
    return [
        {
            "tokens": len(completion.token_ids),
            "text": completion.text,
            "stop": completion.stop,
            **({"noise": completion.noise} if completion.noise else {}),
            "rewards": dict(score.rewards),
            "total": score.total,
            "metrics": dict(score.metrics),
            "failures": dict(score.failures),
        }
        for completion, score in zip(completions, scores, strict=True)
    ]


def join_tokens(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Return the tokens and log-probs of all completions, one after the other."""
    tokens = [token for c in completions for token in c.token_ids]
    logprobs = [value for c in completions for value in c.logprobs]
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        # float64, because the completions hold Python floats.
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
    }


def restore_completion(
    values: Mapping[str, Any], tokens: Tensor, logprobs: Tensor, answer: Any
) -> tuple[Completion, Score]:
    """Restore a completion and its score from what the functions above returned."""
    token_ids, known = tuple(tokens.tolist()), tuple(logprobs.tolist())
    text, stop, noise = values["text"], values["stop"], values.get("noise", 0)
    completion = Completion(token_ids, known, text, stop, noise=noise)
    total, failures = values["total"], values["failures"]
    return completion, Score(answer, values["rewards"], total, values["metrics"], failures)


def _serialize_tensors(step: PartialStep) -> dict[str, Tensor]:
    """Return the tensors of this rank's step, concatenated over completions."""
    groups = (*step.rollout.groups, *step.rollout.replayed)
    tensors = join_tokens([c for group in groups for c in group.completions])
    tensors["advantages"] = step.batch.advantages
    values = {name: step.batch.values.get(field, {}) for name, field in TOKEN_VALUES.items()}
    for name, by_row in {**values, "old": step.updates.old_logprobs}.items():
        if by_row:
            tensors[name] = torch.cat([by_row[row] for row in sorted(by_row)])
    metrics = step.updates.metrics
    for name, pair in metrics.means.items():
        tensors[f"mean/{name}"] = torch.stack([torch.as_tensor(value) for value in pair])
    tensors |= {f"minimum/{name}": torch.as_tensor(v) for name, v in metrics.minima.items()}
    tensors |= {f"maximum/{name}": torch.as_tensor(v) for name, v in metrics.maxima.items()}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _SavedRank:
    """The part of a step that one rank saved, with its tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def work(self) -> dict[str, int]:
        """The fields of ``Counters``."""
        return {**self.values["work"], **{name: self.values[name] for name in LOADER_COUNTERS}}


@dataclass(frozen=True)
class _SavedGroup:
    """A group of a saved step, with tensors by completion: ``tokens``, ``logprobs``, …"""

    values: dict[str, Any]
    rows: list[dict[str, Tensor]]

    @property
    def is_replayed(self) -> bool:
        """Whether the group is of an earlier step."""
        return "replayed" in self.values


def restore_step(
    values: Sequence[dict[str, Any]],
    tensors: Mapping[str, Tensor],
    sampler: RolloutSampler,
    settings: Settings,
    accelerator: Accelerator,
) -> PartialStep:
    """Restore this rank's part of a saved step.

    Args:
        values: JSON values from ``serialize_step``. If the number of ranks has changed, the groups
            are redistributed.
        tensors: tensors from ``serialize_step``.
        sampler: loads the prompts, and parses the answers again.

    Raises:
        UserError: a prompt has changed.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    saved = [
        _SavedRank(part, dict(_select(tensors, f"{index}/", torch.device("cpu"))))
        for index, part in enumerate(values)
    ]
    if len(saved) == world:
        groups, rounds = list(_split_groups(saved[rank])), values[rank]["rounds"]
    else:
        groups = [group for part in saved for group in _split_groups(part)][rank::world]
        rounds = [indices for part in values for indices in part["rounds"]]
    prompts: dict[str, Prompt] = {}
    for indices in rounds:  # as in the rollout, so that cached features are equal bit for bit
        prompts |= {prompt.example.id: prompt for prompt in sampler.load_prompts(indices)}
    groups.sort(key=lambda group: group.is_replayed)
    rows = [row for group in groups for row in group.rows]
    restored = [_restore_group(g, prompts.get(g.values["id"]), sampler.task) for g in groups]
    sampled = sum(not group.is_replayed for group in groups)
    rollout = Rollout(
        tuple(restored[:sampled]),
        values[0]["resampled"],
        tuple(map(tuple, rounds)),
        mini_batches=tuple(group.values.get("mini_batch", 0) for group in groups),
        is_supervised=values[0].get("supervised", False),
        replayed=tuple(restored[sampled:]),
    )
    advantages = torch.stack([row["advantages"] for row in rows]) if rows else torch.zeros(0)
    token_values = {
        field: {index: row[name] for index, row in enumerate(rows)}
        for name, field in TOKEN_VALUES.items()
        if any(name in row for row in rows)
    }
    batch = pack_step(rollout, advantages, token_values, settings, accelerator)
    old = {i: row["old"].to(accelerator.device) for i, row in enumerate(rows) if "old" in row}
    # With fewer ranks than before, a rank continues the sums of several saved ranks.
    local = saved[rank::world]
    work = {name: sum(part.work[name] for part in local) for name in saved[0].work}
    sampler.policy.counters.reset(**work)
    updates = _restore_updates(local, values[0], old, accelerator.device)
    return PartialStep(rollout, batch, values[0]["metrics"], updates)


def _restore_updates(
    local: Sequence[_SavedRank],
    first: dict[str, Any],
    old: dict[int, Tensor],
    device: torch.device,
) -> Updates:
    """Restore the updates made so far, with losses and metrics summed over the ranks ``local``."""
    metrics = MetricAccumulator()
    for part in local:
        means = {name: (pair[0], pair[1]) for name, pair in _select(part.tensors, "mean/", device)}
        minima = dict(_select(part.tensors, "minimum/", device))
        maxima = dict(_select(part.tensors, "maximum/", device))
        metrics = metrics + MetricAccumulator(means=means, minima=minima, maxima=maxima)
    losses = [float(sum(p.values["losses"][k] for p in local)) for k in range(first["updates"])]
    return Updates(old, losses, list(first["norms"]), metrics)


def _select(
    tensors: Mapping[str, Tensor], prefix: str, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors whose names start with ``prefix``, on ``device``, under names without it."""
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor.to(device)


def _split_groups(saved: _SavedRank) -> Iterator[_SavedGroup]:
    """Yield the groups that one rank saved."""
    values, tensors = saved.values, saved.tensors
    lengths = [c["tokens"] for group in values["groups"] for c in group["completions"]]
    rows: list[dict[str, Tensor]] = [
        {"advantages": value} for value in tensors["advantages"].unbind()
    ]
    every_row = range(len(rows))
    complete = dict.fromkeys(("tokens", "logprobs", *TOKEN_VALUES), every_row)
    for name, present in {**complete, "old": values["old_rows"]}.items():
        if name in tensors:
            parts = tensors[name].split([lengths[row] for row in present])
            for row, part in zip(present, parts, strict=True):
                rows[row][name] = part
    start = 0
    for group in values["groups"]:
        stop = start + len(group["completions"])
        yield _SavedGroup(group, rows[start:stop])
        start = stop


def _restore_group(saved: _SavedGroup, prompt: Prompt | None, task: Task) -> Group:
    values = saved.values
    tokens = 0 if prompt is None else len(prompt.token_ids)
    if prompt is None or tokens != values["prompt_tokens"]:
        raise UserError(
            f"example {values['id']}: its prompt had {values['prompt_tokens']} tokens when the "
            f"step was sampled and has {tokens} now: its image or the task's prompt has changed; "
            "restore them, or start a new run with another name=…"
        )
    completions, scores = [], []
    for completion, row in zip(values["completions"], saved.rows, strict=True):
        is_read = "parse" not in completion["failures"]
        answer = task.read(completion["text"], prompt.example) if is_read else None
        restored = restore_completion(completion, row["tokens"], row["logprobs"], answer)
        completions.append(restored[0])
        scores.append(restored[1])
    return Group(prompt, tuple(completions), tuple(scores))
