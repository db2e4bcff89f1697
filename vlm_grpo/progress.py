"""What a run says in the terminal: what it will do, how far it is, what it came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

from vlm_grpo.config import Settings
from vlm_grpo.task import Task

PLAIN_SECONDS = 15.0
"""Between two lines where the output is no terminal."""


def describe_run(settings: Settings, policy, task: Task, held_out: int) -> Iterator[str]:
    """The first lines of a run."""
    weights = [weight.numel() for _, weight in policy.trainable()]
    total = sum(weight.numel() for weight in policy.model.parameters())
    kind = "LoRA" if policy.adapters is not None else "full weights"
    yield f"model      {settings.model} ({total:,} weights, {sum(weights):,} trained, {kind})"
    yield f"task       {settings.task}, trained on {settings.data.train}, {held_out} held out"
    rewards = ", ".join(f"{name} × {w:g}" for name, w in task.reward_weights().items() if w)
    yield f"rewards    {rewards}"
    form = "one prompt pass per group" if policy.shared else "one prompt pass per completion"
    rollout, optim = settings.rollout, settings.optim
    yield (
        f"step       {optim.prompts_per_step} prompts × {rollout.num_generations} completions, "
        f"{form}, on {policy.device}"
    )
    for note in settings.objective.notes():
        yield f"note       {note}"
    yield f"run folder {settings.run_dir}"


class Progress:
    """A live bar in a terminal, a line now and then elsewhere.

    Args:
        total: steps of the run.
        done: steps done before.
        enabled: False on all ranks but the first.
    """

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self.total, self.done, self.enabled = total, done, enabled
        self.started = self.last_line = time.monotonic()
        self.first = done
        console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self.row = self.bar.add_task("train", total=total, completed=done, note="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One step more, with its metrics."""
        self.done += 1
        note = f"reward {metrics['reward']:.3f}  length {metrics['completions/mean_length']:.1f}"
        if not self.bar.disable:
            self.bar.update(self.row, completed=self.done, note=note)
            return
        now = time.monotonic()
        if self.enabled and (now - self.last_line > PLAIN_SECONDS or self.done == self.total):
            self.last_line = now
            left = (now - self.started) / (self.done - self.first) * (self.total - self.done)
            line = f"step {self.done}/{self.total}  {note}  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
