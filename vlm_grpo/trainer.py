"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.benchmarks import held_out_task
from vlm_grpo.checkpoint.manager import Saver, check_resumable, checkpoint_to_resume
from vlm_grpo.checkpoint.partial_step import PartialStep, pack_step, restore_step
from vlm_grpo.checkpoint.store import CheckpointState, CheckpointStep, read_tensors
from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.data.checks import warn_about_shared_images
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.distributed.launch import any_rank, build_accelerator, explain_lost_rank
from vlm_grpo.distributed.optimizer import build_optimizer, build_scheduler
from vlm_grpo.distributed.strategy import place
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.evaluation.evaluate import Evaluation, evaluate_policy
from vlm_grpo.grpo.advantages import step_advantages
from vlm_grpo.grpo.memory import memory_metrics
from vlm_grpo.grpo.nonfinite import Overflows
from vlm_grpo.grpo.reference import Reference
from vlm_grpo.grpo.rollout import Rollout, RolloutSampler, drop_unusable_images
from vlm_grpo.grpo.update import Updater, step_batch
from vlm_grpo.model.policy import Counters, Policy, load_policy
from vlm_grpo.objective import MetricAccumulator
from vlm_grpo.registry import load_task
from vlm_grpo.task import Task
from vlm_grpo.tracking.metrics import rollout_metrics
from vlm_grpo.tracking.progress import Progress
from vlm_grpo.tracking.run_dir import RunFolder
from vlm_grpo.tracking.samples import HELD_OUT_SHOWN
from vlm_grpo.tracking.summary import TrainResult, describe_run
from vlm_grpo.tracking.trackers import check_installed
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import explain_disk_full
from vlm_grpo.utils.signals import StopRequest

logger = logging.getLogger(__name__)


def train(settings: Settings) -> TrainResult:
    """Train as the settings say.

    Everything that can be wrong with settings, task and data is found before the model is loaded.

    Raises:
        UserError: with what is wrong and the remedy.
    """
    stop = StopRequest(settings.checkpoint.max_hours)
    disable_progress_bar()
    check_installed(settings.logging.trackers)
    task = load_task(settings.task, **settings.task_options)
    train_examples = load_examples(settings.data.train, task, settings.data, "train")
    held_out: list[Example] = []
    if settings.data.eval is not None:
        asked = held_out_task(settings, task)
        held_out = load_examples(settings.data.eval, asked, settings.data, "eval")
        warn_about_shared_images(train_examples, held_out)
    accelerator = build_accelerator(settings)
    resume_from = checkpoint_to_resume(settings, accelerator)
    if resume_from is not None:
        check_resumable(resume_from, settings, train_examples)
    set_seed(settings.seed)
    policy = load_policy(settings, resume_from)
    trainer = Trainer(settings, policy, task, train_examples, held_out, accelerator)
    if resume_from is not None:
        trainer.restore(resume_from)
    with explain_disk_full(settings.run_dir), explain_lost_rank():
        result = trainer.run(stop)
    trainer.accelerator.print(result)
    return result


class StepInterrupted(Exception):
    """A stop request was obeyed in the middle of a step."""


class Trainer:
    """GRPO on one policy and one task.

    Args:
        settings: the run's settings.
        policy: what is trained.
        task: asks and scores.
        train_examples: at least one.
        held_out: evaluated before, after, and in between; may be empty.
        accelerator: the run's processes; None: as they were launched.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        task: Task,
        train_examples: Sequence[Example],
        held_out: Sequence[Example],
        accelerator: Accelerator | None = None,
    ) -> None:
        self.settings, self.policy = settings, policy
        limit = settings.rollout.max_completion_length
        self.task = replace(task, frame=policy.frame, token_limit=limit)
        self.held_out = drop_unusable_images(policy, held_out, settings.data)
        shown = drop_unusable_images(policy, train_examples, settings.data)
        self.held_out_task = held_out_task(settings, self.task)
        self.accelerator = accelerator or build_accelerator(settings)
        self.placement = place(policy, self.accelerator)
        weights = [weight for _, weight in self.placement.trainable]
        optimizer = build_optimizer(weights, settings.optim)
        self.placement.take(optimizer, settings.optim.max_grad_norm or math.inf)
        self.scheduler = build_scheduler(optimizer, settings.optim)
        self.update = Updater(
            policy,
            self.placement,
            Reference(self.placement.trainable, settings.objective),
            self.scheduler,
            self.accelerator,
            settings,
            settings.optim.max_tokens_per_batch,
        )
        self.roll = RolloutSampler(
            policy,
            self.task,
            ExampleStream(shown, settings.seed),
            settings,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )
        is_main = self.accelerator.is_main_process
        self.folder = RunFolder(settings, self.task, self.held_out_task, is_main)
        self.saver = Saver(settings, policy, self.update, train_examples)
        self.stopwatch = policy.stopwatch
        self.step = 0
        self.best: tuple[float, int] | None = None
        self.overflows = Overflows(settings.run_dir, self.accelerator.process_index)
        self.restored = False
        self.open: PartialStep | None = None
        self.stop = StopRequest()

    @property
    def reference(self) -> Reference:
        return self.update.reference

    def run(self, stop: StopRequest | None = None) -> TrainResult:
        """All steps that are left, with the evaluations and checkpoints due among them.

        Args:
            stop: ends the run; None: signals do, and the time limit, which counts from here.

        Raises:
            Stopped: the run has ended on request, its state saved.
        """
        settings, last = self.settings, self.settings.optim.max_steps
        self.stop = stop or StopRequest(settings.checkpoint.max_hours)
        self.folder.open(self.step)
        train = self.roll.loader.stream.examples
        for line in describe_run(settings, self.policy, self.task, train, self.held_out):
            self.accelerator.print(line)
        before = None if self.restored else self._evaluate()
        after = None
        is_main = self.accelerator.is_main_process
        progress = Progress(
            settings, self.held_out_task.primary_metric, self.stopwatch, self.step, is_main
        )
        with closing(self.roll), self.stop, self.saver.writer, progress:
            while self.step < last and not self._stopping():
                self.stopwatch.reset()
                try:
                    metrics = self.run_step()
                except StepInterrupted:
                    break
                self.step += 1
                if self._evaluation_due(self.step):
                    after = self._evaluate_step(metrics)
                self.folder.write_metrics(self.step - 1, metrics)
                progress.advance(metrics)
                self.saver.writer.check()
                is_best = settings.checkpoint.keep_best and self.best_step == self.step
                is_due = _divides(settings.checkpoint.every, self.step)
                if is_best or is_due or self.step == last:
                    self._save()
                self.folder.refresh_report()
            if self.step < last and self.saver.saved != self.moment:
                self._save()
        self.folder.close()
        self.accelerator.end_training()
        checkpoint = self.saver.folder / self.moment.name
        if self.step < last:
            raise Stopped(
                f"stopped by {self.stop.reason or 'another process'} {self._where()}; saved in "
                f"{checkpoint}; resume=true goes on",
                self.stop.status,
            )
        return TrainResult(
            before,
            after,
            self.best,
            checkpoint,
            settings.run_dir,
            self.held_out_task.lower_is_better,
        )

    def run_step(self) -> dict[str, float]:
        """One rollout and its updates; returns their metrics.

        Raises:
            LeftOpen: a stop was asked for, and updates or an evaluation are still to be made.
        """
        step = self.open = self.open or self._begin_step()
        with self.stopwatch("update"):
            self.policy.model.train()
            while step.updates.count < self.settings.objective.num_iterations:
                if self._stopping():
                    raise StepInterrupted
                self.update(step.batch, step.updates)
        if self._evaluation_due(self.step + 1) and self._stopping():
            raise StepInterrupted
        self.open = None
        return self._end_step(step)

    def _begin_step(self) -> PartialStep:
        """The step's groups and what each completion is worth."""
        self.policy.counters = Counters()
        decodes, replaced = self.roll.loader.decodes, self.roll.loader.replaced
        started = time.perf_counter()
        rollout = self._rollout()
        self.reference.refresh(self.step)
        with self.stopwatch("reference"):
            reference, penalties = self.update.reference_pass(rollout.groups)
        weights = self.task.reward_weights()
        advantages, mine = step_advantages(
            rollout.groups, weights, penalties, self.settings.objective, self.accelerator
        )
        batch = step_batch(rollout.groups, mine, reference, self.settings, self.accelerator)
        metrics = {
            **sum(gather_object([rollout_metrics(rollout.groups)]), MetricAccumulator()).values(
                empty=math.nan
            ),
            "reward_std": advantages.group_stds.nanmean().item(),
            "frac_reward_zero_std": advantages.frac_reward_zero_std,
            "unscorable": advantages.unscorable,
            "resampled_groups": rollout.resampled,
        }
        return PartialStep(rollout, batch, metrics, decodes, replaced, started)

    def _end_step(self, step: PartialStep) -> dict[str, float]:
        """What the step came to, once its updates are made."""
        metrics = self.update.finish(step.updates)
        self.policy.clear_image_cache()
        if self.folder.samples_due(self.step) or metrics["skipped_updates"]:
            self.folder.write_samples(self.step, step.rollout.groups, step.batch.advantages)
        groups, skipped = step.rollout.groups, bool(metrics["skipped_updates"])
        self.overflows.note(self.step, skipped, groups, step.batch.advantages)
        self.stopwatch.seconds["step"] = time.perf_counter() - step.started
        done = {
            **{f"work/{name}": count for name, count in vars(self.policy.counters).items()},
            "work/image_decodes": self.roll.loader.decodes - step.decodes,
            "replaced_prompts": self.roll.loader.replaced - step.replaced,
        }
        return {
            **metrics,
            **step.metrics,
            **sum(gather_object([MetricAccumulator(sums=done)]), MetricAccumulator()).values(),
            "learning_rate": self.scheduler.get_last_lr()[0],
            **memory_metrics(self.accelerator.device),
            **{f"time/{name}": seconds for name, seconds in self.stopwatch.seconds.items()},
        }

    def _stopping(self) -> bool:
        """Whether any rank was asked to stop; all of them learn it here together."""
        return any_rank(self.accelerator, self.stop.reason is not None)

    def _rollout(self) -> Rollout:
        """The step's groups. Where one cannot be made, the run is saved as it was before."""
        position = self.roll.position
        try:
            with self.placement.gathered():
                return self.roll(progress=self.step / self.settings.optim.max_steps)
        except UserError as failure:  # on all ranks, whichever of them it came from
            self.roll.position = position
            self._save_before(failure)

    def _save_before(self, failure: UserError) -> NoReturn:
        """Save what has been learned so far, and end the run with the failure."""
        if self.step > 0 and self.saver.saved != self.moment:
            self._save()
            self.saver.writer.wait()
        raise failure

    def _evaluate_step(self, metrics: dict[str, float]) -> Evaluation | None:
        """Evaluate after a step and put the result among its metrics."""
        try:
            found = self._evaluate()
        except UserError as error:
            self.folder.write_metrics(self.step - 1, metrics)
            self._save_before(error)
        if found is not None:
            metrics |= {f"eval/{name}": value for name, value in found.metrics.items()}
        return found

    def _evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        with self.stopwatch("evaluation"), self.placement.gathered():
            found = evaluate_policy(
                self.policy, self.held_out_task, self.held_out, self.settings, self.roll.judge
            )
        shown = [self.policy.with_resized_sizes(e) for e in self.held_out[:HELD_OUT_SHOWN]]
        self.folder.write_evaluation(self.step, self.held_out_task, found, shown)
        if found.better_than(None if self.best is None else self.best[0]):
            self.best = (found.value, self.step)
        return found

    @property
    def best_step(self) -> int | None:
        """The step after which the held-out primary metric was best; None before any evaluation."""
        return None if self.best is None else self.best[1]

    def _evaluation_due(self, step: int) -> bool:
        is_last = step == self.settings.optim.max_steps
        return bool(self.held_out) and (is_last or _divides(self.settings.evaluation.every, step))

    # Checkpoints.

    @property
    def moment(self) -> CheckpointStep:
        """Where the run stands."""
        return (
            CheckpointStep(self.step)
            if self.open is None
            else CheckpointStep(self.step, self.open.updates.count)
        )

    def _where(self) -> str:
        """The same in words."""
        where = f"after step {self.step} of {self.settings.optim.max_steps}"
        if self.open is None:
            return where
        of = self.settings.objective.num_iterations
        return f"{where} and {self.open.updates.count} of {of} updates of the next"

    def _save(self) -> None:
        numbers: dict[str, Any] = {
            "step": self.step,
            "position": self.roll.position,
            "best": self.best,
            "overflows": self.overflows.count,
            # Lower than the settings' where memory ran out; another cut rounds otherwise.
            "max_tokens": [self.roll.max_tokens, self.update.max_tokens],
        }
        tensors: dict[str, dict[str, Tensor]] = {}
        if self.open is not None:
            numbers["open_step"], tensors["open_step"] = pack_step(
                self.open, self.policy, self.roll
            )
        best = None
        if self.settings.checkpoint.keep_best and self.best_step is not None:
            best = CheckpointStep(self.best_step)
        with self.stopwatch("saving"):
            self.saver.save(self.moment, CheckpointState(numbers, tensors), best)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint whose weights the policy was loaded with.

        Raises:
            UserError: it cannot be read, or does not fit settings, data or model.
        """
        numbers = self.saver.restore(checkpoint)
        self.step, self.roll.position = numbers["step"], numbers["position"]
        self.best = tuple(numbers["best"]) if numbers["best"] is not None else None
        self.overflows.count = numbers["overflows"]
        sampled, updated = numbers["max_tokens"]
        before, now = numbers["settings"], self.settings
        if before["rollout.max_tokens_per_batch"] == now.rollout.max_tokens_per_batch:
            self.roll.max_tokens = sampled
        if before["optim.max_tokens_per_batch"] == now.optim.max_tokens_per_batch:
            self.update.max_tokens = updated
        if "open_step" in numbers:
            tensors = read_tensors(checkpoint, "open_step")
            with self.placement.gathered():
                self.open = restore_step(
                    numbers["open_step"], tensors, self.roll, self.settings, self.accelerator
                )
        self.restored = True


def _divides(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
