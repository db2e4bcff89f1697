"""The training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.announce import TrainResult, describe_run
from vlm_grpo.checkpoint import Moment, checkpoints, newest_checkpoint
from vlm_grpo.config import Settings
from vlm_grpo.credit import step_advantages
from vlm_grpo.data import load_examples
from vlm_grpo.data.care import warn_of_shared_images
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.evaluate import Evaluation, evaluate_policy, held_out_task
from vlm_grpo.files import told_if_full
from vlm_grpo.memory import memory_metrics
from vlm_grpo.objective import Advantages
from vlm_grpo.optimizer import build_optimizer, build_scheduler
from vlm_grpo.overflow import Overflows
from vlm_grpo.placement import place
from vlm_grpo.policy import Counters, Policy, load_policy
from vlm_grpo.progress import Progress
from vlm_grpo.ranks import any_rank, build_accelerator
from vlm_grpo.reference import Reference
from vlm_grpo.registry import load_task
from vlm_grpo.rollout import Roller, Rollout, seeable
from vlm_grpo.run_folder import RunFolder
from vlm_grpo.saving import Saver
from vlm_grpo.stopping import StopRequest
from vlm_grpo.task import Task
from vlm_grpo.trackers import check_installed
from vlm_grpo.tracking import HELD_OUT_SHOWN, Tally, step_tally
from vlm_grpo.types import Example
from vlm_grpo.update import Updater, step_batch

logger = logging.getLogger(__name__)


def train(settings: Settings) -> TrainResult:
    """Train as the settings say.

    Everything that can be wrong with settings, task and data is found before the model is loaded.

    Raises:
        UserError: with what is wrong and the remedy.
    """
    disable_progress_bar()
    check_installed(settings.logging.trackers)
    task = load_task(settings.task, **settings.task_options)
    train_examples = load_examples(settings.data.train, task, settings.data, "train")
    held_out: list[Example] = []
    if settings.data.eval is not None:
        asked = held_out_task(settings, task)
        held_out = load_examples(settings.data.eval, asked, settings.data, "eval")
        warn_of_shared_images(train_examples, held_out)
    accelerator = build_accelerator(settings)
    resume_from = _checkpoint_to_resume(settings, accelerator)
    set_seed(settings.seed)
    policy = load_policy(settings, resume_from)
    trainer = Trainer(settings, policy, task, train_examples, held_out, accelerator)
    if resume_from is not None:
        trainer.restore(resume_from)
    with told_if_full(settings.run_dir):
        result = trainer.run()
    trainer.accelerator.print(result)
    return result


def _checkpoint_to_resume(settings: Settings, accelerator: Accelerator) -> Path | None:
    """The newest whole checkpoint, found by the first rank for all."""
    folder = settings.run_dir / "checkpoints"
    if not settings.resume:
        if found := checkpoints(folder):
            raise UserError(
                f"{settings.run_dir} holds a run with checkpoints up to step {found[-1][0].steps}: "
                "set resume=true to go on with it, or name=… for a new one"
            )
        return None
    found = [newest_checkpoint(folder) if accelerator.is_main_process else None]
    return broadcast_object_list(found)[0]


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
        self.held_out = seeable(policy, held_out, settings.data)
        train_examples = seeable(policy, train_examples, settings.data)
        self.held_out_task = held_out_task(settings, self.task)
        self.accelerator = accelerator or build_accelerator(settings)
        self.placement = place(policy, self.accelerator)
        weights = [weight for _, weight in self.placement.trainable]
        optimizer = build_optimizer(weights, settings.optim)
        self.scheduler = build_scheduler(optimizer, settings.optim)
        self.update = Updater(
            policy,
            self.placement,
            Reference(self.placement.trainable, settings.objective),
            optimizer,
            self.scheduler,
            self.accelerator,
            settings,
            settings.optim.max_tokens_per_batch,
        )
        self.roll = Roller(
            policy,
            self.task,
            ExampleStream(train_examples, settings.seed),
            settings,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )
        self.folder = RunFolder(settings, self.task, self.accelerator.is_main_process)
        self.saver = Saver(settings, policy, self.update)
        self.stopwatch = policy.stopwatch
        self.step = 0
        self.best: tuple[float, int] | None = None
        self.overflows = Overflows(settings.run_dir, self.accelerator.process_index)
        self.restored = False

    @property
    def reference(self) -> Reference:
        return self.update.reference

    def run(self) -> TrainResult:
        """All steps that are left, with the evaluations and checkpoints due among them."""
        settings, last = self.settings, self.settings.optim.max_steps
        self.folder.open(self.step)
        train = self.roll.loader.stream.examples
        for line in describe_run(settings, self.policy, self.task, train, self.held_out):
            self.accelerator.print(line)
        before = None if self.restored else self._evaluate()
        after = None
        stop = StopRequest(settings.checkpoint.max_hours)
        is_main = self.accelerator.is_main_process
        progress = Progress(settings, self.task.headline, self.stopwatch, self.step, is_main)
        with stop, progress, closing(self.roll):
            while self.step < last and not any_rank(self.accelerator, stop.reason is not None):
                self.stopwatch.reset()
                metrics = self.run_step()
                self.step += 1
                if self._due(settings.evaluation.every) or self.step == last:
                    after = self._evaluate_step(metrics)
                self.folder.write_metrics(self.step - 1, metrics)
                progress.advance(metrics)
                is_best = settings.checkpoint.keep_best and self.best_step == self.step
                if is_best or self._due(settings.checkpoint.every) or self.step == last:
                    self._save()
                self.folder.refresh_report()
            if self.step < last and self.saver.saved != self.moment:
                self._save()
            self.saver.writer.wait()
        self.folder.close()
        self.accelerator.end_training()
        checkpoint = self.saver.folder / self.moment.name
        if self.step < last:
            where = f"after step {self.step} of {last}; saved in {checkpoint}"
            reason = stop.reason or "another process"
            raise Stopped(f"stopped by {reason} {where}; resume=true goes on", stop.status)
        return TrainResult(before, after, self.best, checkpoint, settings.run_dir)

    def run_step(self) -> dict[str, float]:
        """One rollout and its update."""
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
        with self.stopwatch("update"):
            self.policy.model.train()
            batch = step_batch(rollout.groups, mine, reference, self.settings, self.accelerator)
            metrics = self.update(batch)
        self.policy.forget_images()
        if self.folder.samples_due(self.step) or metrics["skipped_updates"]:
            self.folder.write_samples(self.step, rollout.groups, mine)
        self.overflows.note(self.step, bool(metrics["skipped_updates"]), rollout.groups, mine)
        self.stopwatch.seconds["step"] = time.perf_counter() - started
        done = {
            **{f"work/{name}": count for name, count in vars(self.policy.counters).items()},
            "work/image_decodes": self.roll.loader.decodes - decodes,
            "replaced_prompts": self.roll.loader.replaced - replaced,
        }
        return metrics | self._metrics(rollout, advantages, done)

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

    def _metrics(
        self, rollout: Rollout, advantages: Advantages, done: Mapping[str, int]
    ) -> dict[str, Any]:
        """Means and counts over all ranks; times and memory are the first rank's."""
        every = gather_object([step_tally(rollout.groups) + Tally(sums=done)])
        return {
            **sum(every, Tally()).values(),
            "reward_std": advantages.group_stds.nanmean().item(),
            "frac_reward_zero_std": advantages.frac_reward_zero_std,
            "unscorable": advantages.unscorable,
            "resampled_groups": rollout.resampled,
            "learning_rate": self.scheduler.get_last_lr()[0],
            **memory_metrics(self.accelerator.device),
            **{f"time/{name}": seconds for name, seconds in self.stopwatch.seconds.items()},
        }

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
        shown = [self.policy.with_seen_sizes(e) for e in self.held_out[:HELD_OUT_SHOWN]]
        self.folder.write_evaluation(self.step, self.held_out_task, found, shown)
        if found.better_than(None if self.best is None else self.best[0]):
            self.best = (found.value, self.step)
        return found

    @property
    def best_step(self) -> int | None:
        """The step after which the held-out headline was best; None before any evaluation."""
        return None if self.best is None else self.best[1]

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    # Checkpoints.

    @property
    def moment(self) -> Moment:
        """Where the run stands."""
        return Moment(self.step)

    def _save(self) -> None:
        numbers = {
            "step": self.step,
            "position": self.roll.position,
            "best": self.best,
            "overflows": self.overflows.count,
        }
        best = None
        if self.settings.checkpoint.keep_best and self.best_step is not None:
            best = Moment(self.best_step)
        with self.stopwatch("saving"):
            self.saver.save(self.moment, numbers, best)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint whose weights the policy was loaded with."""
        numbers = self.saver.restore(checkpoint)
        self.step, self.roll.position = numbers["step"], numbers["position"]
        self.best = tuple(numbers["best"]) if numbers["best"] is not None else None
        self.overflows.count = numbers["overflows"]
        self.restored = True
