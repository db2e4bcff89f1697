"""A step that has been sampled and not yet fully learnt from, and how it goes into a checkpoint.

A run can be stopped between two updates of one rollout. The checkpoint then holds the completions
with their log-probs, rewards and advantages; images and prompts are read from the data again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.batch import StepBatch, pack_step
from vlm_grpo.grpo.rollout import Rollout, RolloutSampler
from vlm_grpo.grpo.update import Updates
from vlm_grpo.model.policy import Counters, Policy
from vlm_grpo.objective import MetricAccumulator
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Group, Prompt, Score


@dataclass
class PartialStep:
    """A step between its rollout and its end, on this rank.

    Attributes:
        rollout: its groups.
        batch: what the update needs of them.
        metrics: what the rollout came to on all ranks, by name.
        updates: the updates made so far.
    """

    rollout: Rollout
    batch: StepBatch
    metrics: Mapping[str, float]
    updates: Updates = field(default_factory=Updates)


def serialize_step(
    step: PartialStep, policy: Policy
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """All ranks' parts of the step, gathered: numbers by rank, tensors as ``rank/name``."""
    numbers = gather_object([_serialize_numbers(step, policy)])
    tensors = gather_object([_serialize_tensors(step)])
    return numbers, {
        f"{rank}/{name}": tensor
        for rank, held in enumerate(tensors)
        for name, tensor in held.items()
    }


def _serialize_numbers(step: PartialStep, policy: Policy) -> dict[str, Any]:
    """What JSON holds of one rank's open step."""
    return {
        "rounds": step.rollout.rounds,
        "resampled": step.rollout.resampled,
        "groups": [
            {
                "id": group.id,
                "prompt_tokens": len(group.prompt.token_ids),
                "completions": [
                    {
                        "tokens": len(completion.token_ids),
                        "text": completion.text,
                        "stop": completion.stop,
                        "rewards": dict(score.rewards),
                        "total": score.total,
                        "metrics": dict(score.metrics),
                        "failures": dict(score.failures),
                    }
                    for completion, score in zip(group.completions, group.scores, strict=True)
                ],
            }
            for group in step.rollout.groups
        ],
        "metrics": dict(step.metrics),
        "updates": step.updates.count,
        "losses": step.updates.losses,
        "norms": step.updates.norms,
        "old_rows": sorted(step.updates.old_logprobs),
        "work": vars(policy.counters),
    }


def _serialize_tensors(step: PartialStep) -> dict[str, Tensor]:
    """What safetensors hold of one rank's open step; completions one after the other."""
    completions = [c for group in step.rollout.groups for c in group.completions]
    tensors = {
        "tokens": torch.tensor(
            [token for c in completions for token in c.token_ids], dtype=torch.int64
        ),
        # Python's floats, in which the completions hold them, are float64.
        "logprobs": torch.tensor(
            [value for c in completions for value in c.logprobs], dtype=torch.float64
        ),
        "advantages": step.batch.advantages,
    }
    for name, by_row in (
        ("reference", step.batch.reference_logprobs),
        ("old", step.updates.old_logprobs),
    ):
        if by_row:
            tensors[name] = torch.cat([by_row[row] for row in sorted(by_row)])
    metrics = step.updates.metrics
    for name, pair in metrics.means.items():
        tensors[f"mean/{name}"] = torch.stack([torch.as_tensor(value) for value in pair])
    for name, value in metrics.maxima.items():
        tensors[f"maximum/{name}"] = torch.as_tensor(value)
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _SavedGroup:
    """One group of a saved step, with its tensors by completion: tokens, logprobs, …"""

    numbers: dict[str, Any]
    rows: list[dict[str, Tensor]]


def restore_step(
    numbers: Sequence[dict[str, Any]],
    tensors: Mapping[str, Tensor],
    roll: RolloutSampler,
    settings: Settings,
    accelerator: Accelerator,
) -> PartialStep:
    """This rank's part of a saved step.

    Args:
        numbers: the numbers that ``serialize_step`` returned. If the number of ranks has changed,
            the groups are redistributed.
        tensors: the tensors that it returned.
        roll: reads the prompts and the answers again.

    Raises:
        UserError: a prompt is no longer what it was.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    saved = [
        (held, dict(_named(tensors, f"{index}/", torch.device("cpu"))))
        for index, held in enumerate(numbers)
    ]
    if len(saved) == world:
        groups, rounds = list(_groups(*saved[rank])), numbers[rank]["rounds"]
    else:
        groups = [group for held in saved for group in _groups(*held)][rank::world]
        rounds = [indices for held in numbers for indices in held["rounds"]]
    prompts: dict[str, Prompt] = {}
    for indices in rounds:  # as in the rollout, so that kept features are the same bit for bit
        taken = roll.loader.load(indices)
        roll.policy.encode_images(taken)
        prompts |= {prompt.example.id: prompt for prompt in taken}
    rows = [row for group in groups for row in group.rows]
    rollout = Rollout(
        tuple(_group(group, prompts.get(group.numbers["id"]), roll.task) for group in groups),
        numbers[0]["resampled"],
        tuple(map(tuple, rounds)),
    )
    advantages = torch.stack([row["advantages"] for row in rows]) if rows else torch.zeros(0)
    reference = {index: row["reference"] for index, row in enumerate(rows) if "reference" in row}
    batch = pack_step(rollout.groups, advantages, reference, settings, accelerator)
    old = {i: row["old"].to(accelerator.device) for i, row in enumerate(rows) if "old" in row}
    # What ranks that are no more have counted is taken over by others.
    mine = saved[rank::world]
    work = [_work(held) for held, _ in mine]
    roll.policy.counters = Counters(**{k: sum(held[k] for held in work) for k in _work(numbers[0])})
    return PartialStep(
        rollout,
        batch,
        numbers[0]["metrics"],
        _updates(mine, numbers[0], old, accelerator.device),
    )


def _work(numbers: Mapping[str, Any]) -> dict[str, int]:
    """Return the work counters; version 0.1.0 kept two of them outside."""
    outside = ("image_decodes", "replaced_prompts")
    return {**{name: numbers[name] for name in outside if name in numbers}, **numbers["work"]}


def _updates(
    mine: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    first: dict[str, Any],
    old: dict[int, Tensor],
    device: torch.device,
) -> Updates:
    """The updates made so far; losses and metrics are those of the ranks ``mine`` together."""
    metrics = MetricAccumulator()
    for _, tensors in mine:
        means = {name: (pair[0], pair[1]) for name, pair in _named(tensors, "mean/", device)}
        maxima = dict(_named(tensors, "maximum/", device))
        metrics = metrics + MetricAccumulator(means=means, maxima=maxima)
    losses = [float(sum(held["losses"][k] for held, _ in mine)) for k in range(first["updates"])]
    return Updates(first["updates"], old, losses, list(first["norms"]), metrics)


def _named(
    tensors: Mapping[str, Tensor], prefix: str, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor.to(device)


def _groups(numbers: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[_SavedGroup]:
    """The groups that one rank saved."""
    lengths = [c["tokens"] for group in numbers["groups"] for c in group["completions"]]
    rows: list[dict[str, Tensor]] = [
        {"advantages": value} for value in tensors["advantages"].unbind()
    ]
    every = range(len(rows))
    for name, present in (
        ("tokens", every),
        ("logprobs", every),
        ("reference", every),
        ("old", numbers["old_rows"]),
    ):
        if name in tensors:
            parts = tensors[name].split([lengths[row] for row in present])
            for row, part in zip(present, parts, strict=True):
                rows[row][name] = part
    start = 0
    for group in numbers["groups"]:
        stop = start + len(group["completions"])
        yield _SavedGroup(group, rows[start:stop])
        start = stop


def _group(saved: _SavedGroup, prompt: Prompt | None, task: Task) -> Group:
    numbers = saved.numbers
    tokens = 0 if prompt is None else len(prompt.token_ids)
    if prompt is None or tokens != numbers["prompt_tokens"]:
        raise UserError(
            f"example {numbers['id']}: its prompt had {numbers['prompt_tokens']} tokens when the "
            f"step was sampled and has {tokens} now: its image or the task's words have changed; "
            "put them back as they were, or begin anew with another name=…"
        )
    completions, scores = [], []
    for held, row in zip(numbers["completions"], saved.rows, strict=True):
        tokens, logprobs = tuple(row["tokens"].tolist()), tuple(row["logprobs"].tolist())
        completions.append(Completion(tokens, logprobs, held["text"], held["stop"]))
        answer = None
        if "parse" not in held["failures"]:
            answer = task.read(held["text"], prompt.example)
        scores.append(
            Score(answer, held["rewards"], held["total"], held["metrics"], held["failures"])
        )
    return Group(prompt, tuple(completions), tuple(scores))
