"""A run's folder: settings, metrics, samples, evaluations and the report in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from vlm_grpo.config.base import flattened
from vlm_grpo.config.run import Settings
from vlm_grpo.evaluation.evaluate import Evaluation, write_predictions, write_summary
from vlm_grpo.report import build_report
from vlm_grpo.task import Task
from vlm_grpo.tracking.alarms import Health, Trained
from vlm_grpo.tracking.metrics import MetricsLog
from vlm_grpo.tracking.samples import THUMBNAIL_SIDE, illustrate, write_held_out, write_samples
from vlm_grpo.tracking.trackers import Trackers
from vlm_grpo.types import Example, Group

logger = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""Between two refreshes of the report while the run goes on."""


class RunFolder:
    """What a run writes besides its checkpoints; on all ranks but the first, nothing.

    Args:
        settings: the run's.
        task: draws the answers.
        held_out: the task that held-out examples are scored by.
        is_main: whether this is the first rank.
    """

    def __init__(self, settings: Settings, task: Task, held_out: Task, is_main: bool) -> None:
        self.path: Path = settings.run_dir
        self.settings, self.task, self.is_main = settings, task, is_main
        # The sampled completions are watched by the held-out primary metric, if they have values
        # of it.
        sampled = {**task.rules("reward"), **task.rules("metric")}
        self.watched = held_out if held_out.primary_metric in sampled else task
        self.trackers = Trackers((), settings.run_dir, {})
        self.reported = time.monotonic()

    def open(self, step: int) -> None:
        """Begin to write after ``step`` steps; what was written of later ones, which are run
        again, is dropped."""
        if not self.is_main:
            return
        settings = self.settings
        settings.save(self.path / "config.yaml")
        self.log = MetricsLog(self.path / "metrics.jsonl", resume_at=step)
        self.alarms = MetricsLog(self.path / "alarms.jsonl", resume_at=step)
        completions = settings.optim.prompts_per_step * settings.rollout.num_generations
        weights, watched = self.task.reward_weights(), self.watched
        trained = Trained(weights, watched.primary_metric, completions, watched.lower_is_better)
        self.health = Health(trained)
        for row in self.log.read():  # so that no alarm is raised twice, and none is missed
            self.health.step(row["step"], row)
        config = {key: str(value) for key, value in flattened(settings.model_dump()).items()}
        self.trackers = Trackers(settings.logging.trackers, self.path, config, resume_at=step)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of ``metrics.jsonl``, the alarms that begin with it, and a point for trackers."""
        if not self.is_main:
            return
        self.log.write(step, metrics)
        for alarm in self.health.step(step, metrics):
            told = {"name": alarm.name, "message": alarm.message, "remedy": alarm.remedy}
            self.alarms.write(step, told)
            logger.warning("step %d: %s: %s; %s", step, alarm.name, alarm.message, alarm.remedy)
        self.trackers.log(step + 1, metrics)

    def close(self) -> None:
        """The last report; nothing is written afterwards."""
        self.refresh_report(now=True)
        if self.is_main:
            self.trackers.finish()

    def samples_due(self, step: int) -> bool:
        """Whether the samples of this step are kept."""
        every = self.settings.logging.samples_every
        return bool(every) and step % every == 0

    def write_samples(self, step: int, groups: Sequence[Group], advantages: Tensor) -> None:
        """The first groups of a step, with (n,) advantages of all groups' completions."""
        if not self.is_main:
            return
        shown = groups[: self.settings.logging.samples_per_step]
        sizes = [len(group.completions) for group in groups]
        parts = [part.tolist() for part in advantages.split(sizes)][: len(shown)]
        write_samples(self.path / "samples", step, shown, parts, self.task)
        if self.trackers.any:
            self.trackers.log_images(step + 1, dict(self._pictures(shown)))

    def _pictures(self, groups: Sequence[Group]) -> Iterator[tuple[str, Image.Image]]:
        """The groups' images with the gold answer and that of the first completion drawn on."""
        for number, group in enumerate(groups):
            example, answer = group.prompt.example, group.scores[0].answer
            picture = illustrate(self.task, example, answer)
            if picture is not None:
                picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
                yield f"samples/{number}", picture

    def write_evaluation(
        self, step: int, task: Task, found: Evaluation, shown: Sequence[Example]
    ) -> None:
        """All predictions and what they come to; and the first ones, those for the examples
        ``shown``, with pictures drawn by the task that scored them."""
        if not self.is_main:
            return
        path = self.path / "evaluation" / f"step-{step:06d}.jsonl"
        write_predictions(path, found)
        write_summary(path.with_suffix(".json"), found)
        write_held_out(self.path / "samples", step, task, shown, found.rows[: len(shown)])

    def refresh_report(self, now: bool = False) -> None:
        """Rebuild ``report.html`` if the last one is older than a minute, or ``now``."""
        if not self.is_main:
            return
        if now or time.monotonic() - self.reported > REPORT_SECONDS:
            build_report(self.path)
            self.reported = time.monotonic()
