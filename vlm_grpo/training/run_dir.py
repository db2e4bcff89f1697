"""The files of a run besides its checkpoints: metrics, alarms, samples, evaluations, report."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import flatten
from vlm_grpo.dist.collectives import fail_together
from vlm_grpo.errors import UserError
from vlm_grpo.eval.scored import Scored, read_scored
from vlm_grpo.report.alarms import AlarmMonitor
from vlm_grpo.report.page import build_report
from vlm_grpo.report.samples import (
    build_completion_rows,
    draw_answers,
    write_held_out,
    write_samples,
)
from vlm_grpo.report.trackers import Trackers
from vlm_grpo.task import Task
from vlm_grpo.training.methods import Method
from vlm_grpo.training.metrics import StepLog, rollout_distributions
from vlm_grpo.types import Example, Group
from vlm_grpo.utils.atomic_io import DISK_FULL_ERRORS, explain_disk_full
from vlm_grpo.utils.folder_lock import check_lock, lock_folder

logger = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""Minimum time between two updates of the report during a run."""


@contextmanager
def lock_run(settings: Settings, accelerator: Accelerator) -> Iterator[None]:
    """Lock the run's folder inside, whose files a second run at the same time would mix up.

    The main process holds the lock. All ranks enter together. A full disk is explained.
    """
    with ExitStack() as stack:
        with fail_together(accelerator), explain_disk_full(settings.run_dir):
            if accelerator.is_main_process:
                try:
                    stack.enter_context(lock_folder(settings.run_dir))
                except OSError as error:
                    if error.errno in DISK_FULL_ERRORS:
                        raise
                    raise UserError(
                        f"the run's folder {settings.run_dir} cannot be created or written to "
                        f"({error.strerror}): set output_dir or name"
                    ) from error
        with explain_disk_full(settings.run_dir):
            yield


class RunDir:
    """A writer of the files of a run besides its checkpoints; only the first rank writes.

    ``monitored`` is the task whose primary metric is monitored on the sampled completions: the
    held-out task if each completion has a value of its primary metric, else the task.
    """

    def __init__(
        self,
        settings: Settings,
        task: Task,
        held_out_task: Task,
        is_main: bool,
        methods: Sequence[Method] = (),  # which may draw on the images of samples
    ) -> None:
        self.path: Path = settings.run_dir
        self.methods = methods
        self.settings, self.task, self.is_main = settings, task, is_main
        per_completion = {**task.rules("reward"), **task.rules("metric")}
        is_sampled = held_out_task.primary_metric in per_completion
        self.monitored = held_out_task if is_sampled else task
        self.metrics = StepLog(self.path / "metrics.jsonl")
        self.alarms = StepLog(self.path / "alarms.jsonl")
        self.distributions = StepLog(self.path / "distributions.jsonl")
        rollout = settings.rollout
        self.monitor = AlarmMonitor(
            task.reward_weights(),
            self.monitored.primary_metric,
            settings.optim.prompts_per_step * rollout.num_generations,
            self.monitored.lower_is_better,
            rollout.is_truncated,
            str(self.path / "config.yaml"),
        )
        self.trackers = Trackers(settings.logging.trackers, self.path)
        self.report_time = time.monotonic()

    def open(self, step: int, written: int | None = None) -> None:
        """Prepare to continue after ``step`` steps, and drop the logs of later ones. ``written``:
        number of steps with metrics, if the last one's evaluation is still to be made; None: all.
        """
        if not self.is_main:
            return
        self.settings.save(self.path / "config.yaml")
        written = step if written is None else written
        self.metrics.truncate(written)
        self.alarms.truncate(written)
        self.distributions.truncate(step)
        if step and (before := self.read_evaluation(0)) is not None:
            self._monitor_before(before)
        for row in self.metrics.read():  # active alarms must not be raised again
            self.monitor.update(row)
        config = flatten(self.settings.model_dump())
        self.trackers.start({key: str(value) for key, value in config.items()}, resume_at=step)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to the log and the trackers, and the alarms that they raise."""
        if not self.is_main:
            return
        check_lock(self.path)
        self.metrics.write(step, metrics)
        for alarm in self.monitor.update(metrics):
            self.alarms.write(step, alarm)
            logger.warning("step %d: %s: %s; %s", step, *alarm.values())
        self.trackers.log(step + 1, metrics)

    def close(self) -> None:
        self.refresh_report(now=True)
        if self.is_main:
            self.trackers.finish()

    def write_groups(
        self, step: int, groups: Sequence[Group], advantages: Tensor, is_skipped: bool
    ) -> None:
        """Write a step's distributions, and its first groups if they are due. All ranks call it.

        A skipped update makes the groups due. ``advantages`` (n,) are those of all completions.
        """
        is_sampled = not self.settings.is_supervised(step)
        distributions = rollout_distributions(groups) if is_sampled else {}
        if not self.is_main:
            return
        check_lock(self.path)
        if is_sampled:
            self.distributions.write(step, distributions)
        every = self.settings.logging.samples_every
        if is_skipped or (every and step % every == 0):
            self._write_samples(step, groups, advantages)

    def _write_samples(self, step: int, groups: Sequence[Group], advantages: Tensor) -> None:
        shown = groups[: self.settings.logging.samples_per_step]
        sizes = [len(group.completions) for group in groups]
        parts = [part.tolist() for part in advantages.split(sizes)][: len(shown)]
        drawn = [{m.name: m.draw(g.prompt.example) for m in self.methods} for g in shown]
        write_samples(self.path / "samples", step, shown, parts, self.task, drawn)
        if self.trackers.any:
            images = {}
            for number, group in enumerate(shown):  # the gold answer and the first completion
                image = draw_answers(self.task, group.prompt.example, group.scores[0].answer)
                if image is not None:
                    images[f"samples/{number}"] = image
            self.trackers.log_images(step + 1, images)
        if self.trackers.takes_tables:
            rows = build_completion_rows(self.task, step, shown, parts)
            self.trackers.log_table(step + 1, "completions", rows)

    def write_evaluation(
        self, step: int, task: Task, evaluation: Scored, shown: Sequence[Example]
    ) -> None:
        """Write all predictions and their metrics, and the first ones with the task's drawings."""
        if not self.is_main:
            return
        check_lock(self.path)
        evaluation.write(self.path / "evaluation" / f"step-{step:06d}.jsonl")
        if step == 0:
            self._monitor_before(evaluation)
        write_held_out(self.path / "samples", step, task, shown, evaluation.rows[: len(shown)])

    def _monitor_before(self, evaluation: Scored) -> None:
        value = evaluation.metrics.get(self.monitored.primary_metric)
        self.monitor.add_held_out(value, is_first=True)

    def read_evaluation(self, step: int) -> Scored | None:
        """Load an evaluation by an earlier process; None if it is missing or damaged."""
        path = self.path / "evaluation" / f"step-{step:06d}.jsonl"
        found = read_scored(path, self.settings.seed, step=step)
        return found if found.is_complete else None

    def refresh_report(self, now: bool = False) -> None:
        """Rebuild ``report.html`` if the last one is older than a minute, or if ``now`` is True."""
        is_due = now or time.monotonic() - self.report_time > REPORT_SECONDS
        if self.is_main and is_due:
            build_report(self.path)
            self.report_time = time.monotonic()
