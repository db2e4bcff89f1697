"""The progress of a run: two live lines in a terminal, and occasional plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from vlm_grpo.config.run import Settings
from vlm_grpo.utils.stopwatch import Stopwatch

PLAIN_SECONDS = 15.0  # minimum time between two lines if the output is not a terminal


class Progress:
    """A display of a run's progress on stderr; ``enabled`` on the first rank only."""

    def __init__(
        self,
        settings: Settings,
        primary_metric: str,
        stopwatch: Stopwatch,
        done: int,
        enabled: bool,
    ) -> None:
        self.total, self.done, self.first = settings.optim.max_steps, done, done
        self.completions = settings.optim.prompts_per_step * settings.rollout.num_generations
        self.primary_metric, self.stopwatch, self.enabled = primary_metric, stopwatch, enabled
        self.started = self.last_line = time.monotonic()
        self.fields, self.held_out = list[str](), list[str]()
        console = Console(stderr=True)
        self.bar = _TwoLines(self, console, disable=not (enabled and console.is_terminal))
        self.row = self.bar.add_task("train", total=self.total, completed=done)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        self.done += 1
        if (value := metrics.get(f"eval/{self.primary_metric}")) is not None:
            self.held_out = [f"held-out {self.primary_metric} {value:.3f}"]
        if "reward" in metrics:
            rate = self.completions / metrics["time/step"]
            length = f"length {metrics['completions/mean_length']:.1f}"
            fields = [f"reward {metrics['reward']:.3f}", *self.held_out, length]
            fields.append(f"{rate:.3g} samples/s")
        else:  # a supervised step
            accuracy = f"token accuracy {metrics['mean_token_accuracy']:.1%}"
            fields = [f"loss {metrics['loss']:.3f}", *self.held_out, accuracy]
        memory = metrics.get("memory/cuda_peak")
        fields.append(f"{metrics['memory/resident'] if memory is None else memory:.1f} GiB")
        if (tokens := metrics.get("speed/rollout_tokens_per_second")) is not None:
            fields.append(f"{tokens:,.0f} tokens/s")
        if (share := metrics.get("speed/mfu")) is not None:
            fields.append(f"MFU {share:.0%}")
        self.fields = fields
        if not self.bar.disable:
            self.bar.update(self.row, completed=self.done)
            return
        now = time.monotonic()
        if self.enabled and (now - self.last_line > PLAIN_SECONDS or self.done == self.total):
            self.last_line = now
            left = (now - self.started) / (self.done - self.first) * (self.total - self.done)
            line = "  ".join((f"step {self.done}/{self.total}", *fields, f"{left:.0f} s left"))
            print(line, file=sys.stderr, flush=True)


class _TwoLines(Bar):
    """The bar, and below it the phase and the last step's metrics."""

    def __init__(self, progress: Progress, console: Console, disable: bool) -> None:
        self.progress = progress
        done = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn()
        left = TextColumn("left"), TimeRemainingColumn()
        super().__init__(*done, *left, console=console, disable=disable)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        phase = self.progress.stopwatch.phase or ""
        line = f"{phase:<10} {'  '.join(self.progress.fields)}"
        yield Text(line, no_wrap=True, overflow="ellipsis")
