"""The training loop."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor
from transformers import get_scheduler
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.checkpoint import (
    TrainerState,
    checkpoints,
    load_state,
    prune,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from vlm_grpo.config import Settings
from vlm_grpo.credit import step_advantages
from vlm_grpo.data import load_examples
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import Stopped, UserError, bullets
from vlm_grpo.evaluate import Evaluation, evaluate_policy, write_predictions
from vlm_grpo.objective import Advantages
from vlm_grpo.policy import Counters, Policy, load_policy
from vlm_grpo.progress import Progress, describe_run
from vlm_grpo.reference import Reference
from vlm_grpo.registry import load_task
from vlm_grpo.report import build_report
from vlm_grpo.rollout import Roller, Rollout
from vlm_grpo.stopping import StopRequest
from vlm_grpo.task import Task
from vlm_grpo.tracking import (
    HELD_OUT_SHOWN,
    MetricsLog,
    step_metrics,
    write_held_out,
    write_samples,
)
from vlm_grpo.types import Example
from vlm_grpo.update import Updater, step_batch

logger = logging.getLogger(__name__)

DATA_PARALLEL = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
MAX_OVERFLOWS = 5
"""Steps in a row without a finite gradient after which a run gives up."""
REPORT_SECONDS = 60.0
"""Between two refreshes of the report while the run goes on."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        before: held-out evaluation of the model as it was loaded; None without held-out data.
        after: the same after the last step.
        checkpoint: the last checkpoint's folder.
        run_dir: the run's folder.
    """

    before: Evaluation | None
    after: Evaluation | None
    checkpoint: Path
    run_dir: Path

    def __str__(self) -> str:
        lines = []
        if self.before is not None:
            lines.append(f"before     {self.before}")
        if self.after is not None:
            lines.append(f"after      {self.after}")
        lines.append(f"report     {self.run_dir / 'report.html'}")
        lines.append(f"samples    {self.run_dir / 'samples'}")
        lines.append(f"checkpoint {self.checkpoint}")
        return "\n".join(lines)


def train(settings: Settings) -> TrainResult:
    """Train as the settings say.

    Everything that can be wrong with settings, task and data is found before the model is loaded.

    Raises:
        UserError: with what is wrong and the remedy.
    """
    disable_progress_bar()
    task = load_task(settings.task, **settings.task_options)
    train_examples = load_examples(settings.data.train, task, settings.data, "train")
    held_out: list[Example] = []
    if settings.data.eval is not None:
        held_out = load_examples(settings.data.eval, task, settings.data, "eval")
    resume_from = _checkpoint_to_resume(settings)
    set_seed(settings.seed)
    policy = load_policy(settings, resume_from)
    trainer = Trainer(settings, policy, task, train_examples, held_out)
    if resume_from is not None:
        trainer.restore(load_state(resume_from))
    result = trainer.run()
    trainer.accelerator.print(result)
    return result


def _checkpoint_to_resume(settings: Settings) -> Path | None:
    found = checkpoints(settings.run_dir / "checkpoints")
    if settings.resume:
        return found[-1][1] if found else None
    if found:
        raise UserError(
            f"{settings.run_dir} holds a run with checkpoints up to step {found[-1][0]}: set "
            "resume=true to go on with it, or name=… for a new one"
        )
    return None


class Trainer:
    """GRPO on one policy and one task.

    Args:
        settings: the run's settings.
        policy: what is trained.
        task: asks and scores.
        train_examples: at least one.
        held_out: evaluated before, after, and in between; may be empty.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        task: Task,
        train_examples: Sequence[Example],
        held_out: Sequence[Example],
    ) -> None:
        self.settings, self.policy = settings, policy
        self.task = replace(task, frame=policy.frame)
        self.held_out = held_out
        refuse_unseeable(policy, [*train_examples, *held_out])
        self.accelerator = _accelerator(settings)
        optim = settings.optim
        policy.model.to(self.accelerator.device)
        optimizer = torch.optim.AdamW(
            _parameter_groups(policy, optim.weight_decay),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )
        self.optimizer = self.accelerator.prepare(optimizer)
        self.scheduler = get_scheduler(
            optim.schedule, optimizer, optim.warmup_steps, num_training_steps=optim.max_steps
        )
        self.reference = Reference(policy.trainable(), settings.objective)
        stream = ExampleStream(train_examples, settings.seed)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.roll = Roller(policy, self.task, stream, settings, rank=rank, world=world)
        self.update = Updater(
            policy,
            self.reference,
            self.optimizer,
            self.scheduler,
            self.accelerator,
            settings,
            optim.max_tokens_per_batch,
        )
        self.step = 0
        self.best: tuple[float, int] | None = None
        self.stopwatch = policy.stopwatch
        self.reported = time.monotonic()
        self.overflows = 0
        self.saved: int | None = None

    def run(self) -> TrainResult:
        """All steps that are left, with the evaluations and checkpoints due among them."""
        settings, last = self.settings, self.settings.optim.max_steps
        if self.accelerator.is_main_process:
            settings.save(settings.run_dir / "config.yaml")
        self.log = MetricsLog(settings.run_dir / "metrics.jsonl", resume_at=self.step)
        for line in describe_run(settings, self.policy, self.task, len(self.held_out)):
            self.accelerator.print(line)
        flat = {key: str(value) for key, value in flattened(settings.model_dump()).items()}
        self.accelerator.init_trackers(settings.run_dir.name, config=flat)
        before = self._evaluate() if self.step == 0 else None
        after = None
        is_main = self.accelerator.is_main_process
        max_hours = settings.checkpoint.max_hours
        with StopRequest(max_hours) as stop, Progress(last, self.step, is_main) as progress:
            while self.step < last and not self._any_rank(stop.reason is not None):
                self.stopwatch.reset()
                metrics = self.run_step()
                self.step += 1
                if self._due(settings.evaluation.every) or self.step == last:
                    after = self._evaluate()
                    if after is not None:
                        metrics |= {f"eval/{name}": value for name, value in after.metrics.items()}
                if is_main:
                    self.log.write(self.step - 1, metrics)
                self.accelerator.log(metrics, step=self.step)
                progress.advance(metrics)
                is_best = settings.checkpoint.keep_best and self.best_step == self.step
                is_due = self._due(settings.checkpoint.every) or self.step == last
                if is_best or is_due:
                    self._save()
                self._refresh_report()
            if self.step < last and self.saved != self.step:
                self._save()
        self.roll.loader.close()
        self.accelerator.end_training()
        self._refresh_report(now=True)
        checkpoint = settings.run_dir / "checkpoints" / f"step-{self.step}"
        if self.step < last:
            where = f"after step {self.step} of {last}; saved in {checkpoint}"
            reason = stop.reason or "another process"
            raise Stopped(f"stopped by {reason} {where}; resume=true goes on", stop.status)
        return TrainResult(before, after, checkpoint, settings.run_dir)

    def run_step(self) -> dict[str, float]:
        """One rollout and its update."""
        self.policy.counters = Counters()
        decodes = self.roll.loader.decodes
        started = time.perf_counter()
        rollout = self.roll(progress=self.step / self.settings.optim.max_steps)
        # Ranks that replaced more groups have drawn further; all go on from the furthest.
        self.roll.position = max(gather_object([self.roll.position]))
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
        self._write_samples(rollout, mine, always=bool(metrics["skipped_updates"]))
        self._watch_for_overflow(metrics)
        self.stopwatch.seconds["step"] = time.perf_counter() - started
        metrics["work/image_decodes"] = self.roll.loader.decodes - decodes
        return metrics | self._metrics(rollout, advantages)

    def _metrics(self, rollout: Rollout, advantages: Advantages) -> dict[str, Any]:
        own = step_metrics(rollout.groups)
        counters = vars(self.policy.counters)
        return {
            **own,
            "reward_std": advantages.group_stds.nanmean().item(),
            "frac_reward_zero_std": advantages.frac_reward_zero_std,
            "unscorable": advantages.unscorable,
            "resampled_groups": rollout.resampled,
            "learning_rate": self.scheduler.get_last_lr()[0],
            **{f"time/{name}": seconds for name, seconds in self.stopwatch.seconds.items()},
            **{f"work/{name}": count for name, count in counters.items()},
        }

    def _set_rates(self) -> None:
        """The settings' optimizer values, over those of a checkpoint."""
        optim = self.settings.optim
        decays = (optim.weight_decay, 0.0)
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group |= {"initial_lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
            group["weight_decay"] = decay
        schedule: Any = self.scheduler
        schedule.base_lrs = [optim.lr] * len(schedule.base_lrs)
        rates = (factor(schedule.last_epoch) for factor in schedule.lr_lambdas)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = optim.lr * rate

    def _any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank, so that all leave the loop together."""
        if self.accelerator.num_processes == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flags, "sum") > 0)  # type: ignore[operator]

    def _watch_for_overflow(self, metrics: Mapping[str, float]) -> None:
        """Give up after several steps in a row whose gradient was not finite."""
        self.overflows = self.overflows + 1 if metrics["skipped_updates"] else 0
        if self.overflows == 1:
            logger.warning("step %d: the gradient is not finite; the update is skipped", self.step)
        if self.overflows >= MAX_OVERFLOWS:
            raise UserError(
                f"the gradient was not finite in {self.overflows} steps in a row, last in step "
                f"{self.step}, whose completions are in {self.settings.run_dir / 'samples'}: "
                "go on from the last checkpoint with a lower optim.lr or policy.dtype=float32"
            )

    def _write_samples(self, rollout: Rollout, advantages: Tensor, always: bool) -> None:
        logging_ = self.settings.logging
        due = logging_.samples_every and self.step % logging_.samples_every == 0
        if not (due or always):
            return
        if not self.accelerator.is_main_process:
            return
        groups = rollout.groups[: logging_.samples_per_step]
        sizes = [len(group.completions) for group in rollout.groups]
        parts = [part.tolist() for part in advantages.split(sizes)][: len(groups)]
        write_samples(self.settings.run_dir / "samples", self.step, groups, parts, self.task)

    def _evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        with self.stopwatch("evaluation"):
            found = evaluate_policy(self.policy, self.task, self.held_out, self.settings)
        if self.accelerator.is_main_process:
            run_dir = self.settings.run_dir
            write_predictions(run_dir / "evaluation" / f"step-{self.step:06d}.jsonl", found)
            shown = [self.policy.with_seen_sizes(e) for e in self.held_out[:HELD_OUT_SHOWN]]
            rows = found.rows[:HELD_OUT_SHOWN]
            write_held_out(run_dir / "samples", self.step, self.task, shown, rows)
        if not math.isnan(found.value) and (self.best is None or found.value > self.best[0]):
            self.best = (found.value, self.step)
        return found

    def _refresh_report(self, now: bool = False) -> None:
        """Rebuild ``report.html`` once a minute, and at the end."""
        if not self.accelerator.is_main_process:
            return
        if now or time.monotonic() - self.reported > REPORT_SECONDS:
            build_report(self.settings.run_dir)
            self.reported = time.monotonic()

    @property
    def best_step(self) -> int | None:
        """The step after which the held-out headline was best; None before any evaluation."""
        return None if self.best is None else self.best[1]

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    # Checkpoints.

    def _save(self) -> None:
        state = TrainerState(
            step=self.step,
            position=self.roll.position,
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            reference=self.reference.state_dict(),
            best=self.best,
            random=random_states(),
        )
        folder = self.settings.run_dir / "checkpoints"

        def save_weights(aside: Path) -> None:
            self.policy.save(aside)
            self.settings.save(aside / "config.yaml")

        if self.accelerator.is_main_process:
            save_checkpoint(folder, state, save_weights)
            keep = {self.best_step} if self.settings.checkpoint.keep_best else set()
            prune(folder, self.settings.checkpoint.keep_last, keep)
        self.saved = self.step

    def restore(self, state: TrainerState) -> None:
        """Go on from a checkpoint whose weights the policy was loaded with."""
        self.step, self.roll.position, self.best = state.step, state.position, state.best
        self.optimizer.load_state_dict(state.optimizer)
        self.scheduler.load_state_dict(state.scheduler)
        self._set_rates()
        self.reference.load_state_dict(state.reference)
        restore_random_states(state.random)


def refuse_unseeable(policy: Policy, examples: Sequence[Example]) -> None:
    """Find every image that the model's resize cannot take, before the first step.

    Raises:
        UserError: with all of them.
    """
    problems = []
    for example in examples:
        try:
            policy.with_seen_sizes(example)
        except ValueError as error:
            problems.append(f"{example.id}: {error}")
    if problems:
        raise UserError(
            f"{len(problems)} examples have images that the model cannot see; take them out:\n"
            f"{bullets(problems)}"
        )


def _accelerator(settings: Settings) -> Accelerator:
    """Devices and trackers.

    Raises:
        UserError: a tracker that the settings name is not installed.
    """
    trackers: list[Any] = list(settings.logging.trackers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`log_with=")  # said below, as an error
        accelerator = Accelerator(
            mixed_precision="no",  # the policy sets its own, for rollout and update alike
            log_with=trackers or None,
            project_dir=settings.run_dir,
        )
    if accelerator.distributed_type not in (DistributedType.NO, *DATA_PARALLEL):
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported: launch with plain data "
            "parallelism (accelerate launch --multi_gpu)"
        )
    if settings.optim.prompts_per_step < accelerator.num_processes:
        raise UserError(
            f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the number of "
            f"processes, {accelerator.num_processes}: each needs a prompt"
        )
    if len(accelerator.log_with) < len(trackers):
        raise UserError(
            f"logging.trackers={trackers}: not all of them are installed; pip install them or "
            "leave them out"
        )
    return accelerator


def _parameter_groups(policy: Policy, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms and biases) do not."""
    weights = [weight for _, weight in policy.trainable()]
    return [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys, as on the command line."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return flat
