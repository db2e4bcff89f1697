"""What a run says before its first step, and after its last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.sharding import full_shape
from vlm_grpo.evaluation.evaluate import Evaluation, shown
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.tokens import Prompts
from vlm_grpo.task import Task
from vlm_grpo.types import Example
from vlm_grpo.utils.bootstrap import bootstrap_interval

LOOKED_AT = 64
"""Examples whose image tokens are counted before the first step."""


def describe_run(
    settings: Settings,
    policy: Policy,
    task: Task,
    train: Sequence[Example],
    held_out: Sequence[Example],
) -> Iterator[str]:
    """The first lines of a run: what it will do."""
    weights = [full_shape(weight).numel() for _, weight in policy.trainable_parameters()]
    total = sum(full_shape(weight).numel() for weight in policy.model.parameters())
    kind = "LoRA" if policy.adapters is not None else "full weights"
    yield f"model      {settings.model} ({total:,} weights, {sum(weights):,} trained, {kind})"
    yield f"task       {settings.task}"
    yield f"data       {settings.data.train}: {len(train):,} examples; {len(held_out):,} held out"
    yield from _image_line(policy, task, train[:LOOKED_AT])
    rewards = ", ".join(f"{name} × {w:g}" for name, w in task.reward_weights().items() if w)
    yield f"rewards    {rewards}"
    form = "one prompt pass per group" if policy.shared else "one prompt pass per completion"
    rollout, optim = settings.rollout, settings.optim
    yield (
        f"step       {optim.prompts_per_step} prompts × {rollout.num_generations} completions, "
        f"{form}, on {policy.device}"
    )
    yield f"reference  {_reference(settings.objective)}"
    for note in settings.objective.notes():
        yield f"note       {note}"
    if settings.checkpoint.asynchronous:
        yield (
            "note       checkpoint.asynchronous: a crash while a checkpoint is being written goes "
            "back to the one before"
        )
    yield f"run folder {settings.run_dir}"


def _image_line(policy: Policy, task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Image tokens of the first examples, for families whose images have a size of their own."""
    if policy.budget is None or not any(example.images for example in examples):
        return
    sizes = Prompts(examples, task, policy.family, policy.processor).sizes(policy.budget)
    images = sorted(size.image_tokens for size in sizes)
    spread = f"{images[0]:,}" if images[0] == images[-1] else f"{images[0]:,} to {images[-1]:,}"
    yield (
        f"images     {spread} tokens an example, prompts up to {sizes[-1].tokens:,} "
        f"(the first {len(examples)} examples)"
    )


def _reference(objective: ObjectiveSettings) -> str:
    every = objective.reference_refresh_every
    if objective.beta == 0:
        return "none: beta=0, the loss has no KL"
    if every == 1:
        return "the policy at the start of each step (k=1): no second model, and a KL of about 0"
    if every == "never":
        return "the policy before its first step, for the whole run"
    return f"the policy, taken anew every {every} steps"


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        before: held-out evaluation of the model as it was loaded; None without held-out data.
        after: the same after the last step.
        best: the best held-out value with its step, the loaded model's included; None without.
        checkpoint: the last checkpoint's folder.
        run_dir: the run's folder.
        lower_is_better: the held-out primary metric is an error.
    """

    before: Evaluation | None
    after: Evaluation | None
    best: tuple[float, int] | None
    checkpoint: Path
    run_dir: Path
    lower_is_better: bool = False

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.before is not None:
            yield f"before     {self.before}"
        if self.after is not None:
            yield f"after      {self.after}"
        if self.before is not None and self.after is not None:
            yield f"change     {change_line(self.before, self.after)}"
        if self.best is not None:
            value, step = self.best
            yield f"best       {shown(value, self.lower_is_better)}, {self._where(step)}"
        yield f"report     {self.run_dir / 'report.html'}"
        yield f"samples    {self.run_dir / 'samples'}"
        yield f"checkpoint {self.checkpoint}"
        config = self.run_dir / "config.yaml"
        yield f"next       vlm-grpo evaluate {config} --checkpoint {self.checkpoint}"
        yield f"           vlm-grpo export {self.checkpoint} exported"

    def _where(self, step: int) -> str:
        checkpoint = self.checkpoint.with_name(f"step-{step}")
        if step == 0:
            return "the model as it was loaded"
        if checkpoint.is_dir():
            return str(checkpoint)
        return f"after step {step}, not kept (checkpoint.keep_best=true keeps it)"


def change_line(before: Evaluation, after: Evaluation) -> str:
    """The primary metric's mean change with its 95 % interval, paired by example.

    A metric of the whole set has its change alone: no example has a value of its own.
    """
    first = {row["id"]: _value(row, before.primary_metric) for row in before.rows}
    pairs = [(first.get(row["id"]), _value(row, after.primary_metric)) for row in after.rows]
    changes = [b - a for a, b in pairs if a is not None and b is not None]
    if math.isnan(after.interval[0]):  # of the whole set, though its examples may have values
        changes = []
    scale, form, unit = (1, "{:+.3f}", "") if after.lower_is_better else (100, "{:+.1f}", " points")
    if not changes:
        change = after.value - before.value
        if math.isnan(change):
            return "no example was scored both times"
        return form.format(scale * change) + unit
    low, high = bootstrap_interval(changes, seed=0)
    mean = sum(changes) / len(changes)
    verdict = "" if low > 0 or high < 0 else ", which may be chance"
    told, least, most = (form.format(scale * change) for change in (mean, low, high))
    return f"{told}{unit} [{least}, {most}]{verdict}"


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value = row["rewards"].get(name)
    return row["metrics"].get(name) if value is None else value
