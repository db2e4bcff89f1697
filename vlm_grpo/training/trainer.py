"""The training loop."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.data import PYTHON
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.loading import load_run
from vlm_grpo.data.objects import Objects, Rows, TaskObject
from vlm_grpo.data.prompt_order import build_stream
from vlm_grpo.dist.collectives import any_rank, explain_lost_rank, fail_together
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.eval.evaluate import HeldOutEvaluator
from vlm_grpo.eval.scored import Scored
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.report.progress import Progress
from vlm_grpo.report.samples import HELD_OUT_SHOWN
from vlm_grpo.report.trackers import check_installed
from vlm_grpo.task import Task
from vlm_grpo.training.checkpoint.disk_space import check_disk
from vlm_grpo.training.checkpoint.manager import (
    CheckpointManager,
    RunState,
    get_rng_states,
    set_rng_states,
)
from vlm_grpo.training.checkpoint.resume import find_checkpoint
from vlm_grpo.training.learning_rate import get_rates
from vlm_grpo.training.methods import Run, build_methods
from vlm_grpo.training.metrics import rollout_metrics
from vlm_grpo.training.objective.custom import load_estimator
from vlm_grpo.training.rollout import RolloutSampler, select_usable
from vlm_grpo.training.run_dir import RunDir, lock_run
from vlm_grpo.training.speed import StepMeter
from vlm_grpo.training.step_batch import Rollout, compute_advantages
from vlm_grpo.training.stopping import StepInterrupted, StopRequest, check_gradients
from vlm_grpo.training.summary import TrainResult, describe_run, describe_start
from vlm_grpo.training.update import build_updater, pack_step
from vlm_grpo.types import Example
from vlm_grpo.utils import trust


def train(
    settings: Settings,
    *,
    task: TaskObject | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
) -> TrainResult:
    """Run or resume training with these settings.

    The settings, the task and the data are checked before the model is loaded.

    Args:
        settings: the settings; ``python`` stands for a task or data that are given here.
        task: a task or its class, in place of the one of the settings.
        data, held_out: rows in place of ``data.train`` and ``data.eval``.

    Raises:
        UserError: something is wrong that the user can fix; the message says how.
        Stopped: the run was stopped by a signal or its time limit, and its state was saved.
    """
    objects = Objects(task, data, held_out)
    settings = objects.name_in(check_settings(settings))
    stop_request = StopRequest(settings.checkpoint.max_hours)
    disable_progress_bar()
    check_installed(settings.logging.trackers)
    run_task, train_examples, held_out_examples = load_run(settings, objects)
    accelerator = build_accelerator(settings)
    with explain_lost_rank(), lock_run(settings, accelerator):
        checkpoint = find_checkpoint(settings, accelerator, train_examples, run_task)
        set_seed(settings.seed)
        policy = load_policy(settings, checkpoint)
        examples = train_examples, held_out_examples
        trainer = Trainer(settings, policy, run_task, *examples, accelerator)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        result = trainer.run(stop_request)
    accelerator.print(result)
    return result


class Trainer:
    """A trainer of one policy on one task with GRPO.

    There is at least one training example; the held-out examples are evaluated before, during and
    after training. ``global_step`` is the number of finished steps.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        task: Task,
        train_examples: Sequence[Example],
        held_out: Sequence[Example] = (),
        accelerator: Accelerator | None = None,
    ) -> None:
        settings = self.settings = check_settings(settings).with_steps(len(train_examples))
        self.policy, self.stopwatch = policy, policy.stopwatch
        limit = settings.rollout.max_completion_length
        self.task = replace(policy.prompts.adapt(task), token_limit=limit)
        methods = self.methods = build_methods(settings)
        self.train_examples = select_usable(policy, train_examples, self.task, settings, methods)
        ranks = self.accelerator = accelerator or build_accelerator(settings)
        self.updater = build_updater(policy, settings, self.accelerator, methods)
        self.estimator = load_estimator(settings.objective.advantage_estimator)
        strategy = self.strategy = self.updater.strategy
        stream = build_stream(self.train_examples, settings)
        for method in methods.values():
            method.start(Run(settings, strategy, stream, self.task))
        self.sampler = RolloutSampler(strategy, self.task, stream, settings, methods)
        scorer = self.sampler.scorer
        self.evaluator = HeldOutEvaluator(self.strategy, self.task, held_out, settings, scorer)
        self.checkpoints = CheckpointManager(settings, self.updater, self.sampler, train_examples)
        self.meter = StepMeter(policy, settings, self.accelerator)
        tasks, is_main = (self.task, self.evaluator.task), ranks.is_main_process
        self.run_dir = RunDir(settings, *tasks, is_main, [*methods.values()])
        self.global_step, self.nonfinite_steps = 0, 0
        # the last step's metrics while its evaluation is due and not made
        self.unevaluated: dict[str, float] | None = None
        self.stop_request = StopRequest()

    def step(self) -> dict[str, float]:
        """Run one step, and return its metrics."""
        settings, ranks = self.settings, self.accelerator
        with self.meter.step(self.global_step):
            rollout = self._rollout()
            with self.stop_request.finishing("update"):
                scores = self.updater.score(rollout)
                advantages = compute_advantages(
                    rollout, scores, settings.objective, self.estimator, ranks
                )
                for method in self.methods.values():
                    advantages = method.credit(rollout, advantages)
                batch = pack_step(rollout, scores, advantages, self.methods, settings)
                monitored = self.run_dir.monitored
                primary = "" if monitored.lower_is_better else monitored.primary_metric
                metrics = rollout_metrics(rollout, advantages, primary)
                metrics = {**self.updater.update(batch), **metrics}
                metrics |= get_rates(self.updater.scheduler)
                self.policy.engine.clear_image_features()
                groups, own = rollout.groups, advantages.own[: rollout.num_sampled]
                is_skipped = bool(metrics["skipped_updates"])
                with fail_together(ranks):  # the main process writes
                    self.run_dir.write_groups(self.global_step, groups, own, is_skipped)
                self.nonfinite_steps = self.nonfinite_steps + 1 if is_skipped else 0
                check_gradients(self.global_step, self.nonfinite_steps, settings.run_dir)
        metrics |= self.meter.measure(rollout, batch)
        self.global_step += 1
        return metrics

    def _rollout(self) -> Rollout:
        """Sample and score the step's groups. If that fails, save the state before the step."""
        self.policy.counters.reset()
        self.stopwatch.reset()
        states = get_rng_states()
        with self._save_on_error():
            try:
                return self.sampler.sample(self.global_step, self.stop_request)
            except (StepInterrupted, UserError):
                set_rng_states(states)  # a reward may use them
                raise

    def run(self, stop_request: StopRequest | None = None) -> TrainResult:
        """Run the remaining steps with the evaluations and checkpoints due between them.

        ``stop_request`` ends the run early; None: signals and the time limit, counted from now.

        Raises:
            Stopped: the run was stopped on request, and its state was saved.
            UserError: another process uses the run's folder, or the settings, the data or the
                memory do not allow a step.
        """
        self.stop_request = stop_request or StopRequest(self.settings.checkpoint.max_hours)
        with lock_run(self.settings, self.accelerator):
            return self._run()

    def _run(self) -> TrainResult:
        settings, last = self.settings, self.settings.optim.max_steps
        lines = describe_start(settings, self.checkpoints.origin, self._is_done)
        if not self._is_done:
            check_disk(settings, self.updater)
            examples = self.train_examples, self.evaluator.examples
            lines = [*lines, *describe_run(settings, self.policy, self.task, *examples)]
        for line in lines:
            self.accelerator.print(line)
        if self._is_done and self.global_step > last:
            self.sampler.close()
            return self._build_result(None, None)
        done = self.global_step - (self.unevaluated is not None)
        with fail_together(self.accelerator):  # the main process reads the metrics so far
            self.run_dir.open(self.global_step, done)
        is_resumed = self.checkpoints.origin is not None
        before = self.run_dir.read_evaluation(0) if is_resumed else self._evaluate()
        after = self.run_dir.read_evaluation(last) if self.global_step == last else None
        metric, is_main = self.evaluator.task.primary_metric, self.accelerator.is_main_process
        progress = Progress(settings, metric, self.stopwatch, done, is_main)
        with closing(self.sampler), self.stop_request, progress:
            while not self._is_done and not self._stop_requested():
                try:
                    metrics = self.unevaluated = self.unevaluated or self.step()
                except StepInterrupted:
                    break
                if self.evaluator.is_due(self.global_step):
                    if self._stop_requested():
                        break
                    after = self._evaluate_step(metrics)
                self.unevaluated = None
                with fail_together(self.accelerator):
                    self.run_dir.write_metrics(self.global_step - 1, metrics)
                progress.advance(metrics)
                if self.checkpoints.is_due(self.state):
                    self._save()
                self.run_dir.refresh_report()
            if not self._is_done and not self.checkpoints.is_saved(self.state):
                self._save()
        self.run_dir.close()
        self.accelerator.end_training()
        if not self._is_done:
            checkpoint = self.checkpoints.path(self.state)
            reason, status = self.stop_request.reason or "another process", self.stop_request.status
            place = f"after step {self.global_step} of {last}"
            place += "" if self.unevaluated is None else " and before its evaluation"
            raise Stopped(
                f"stopped by {reason} {place}; saved in {checkpoint}; continue with resume=true",
                status,
            )
        return self._build_result(before, after)

    def _build_result(self, before: Scored | None, after: Scored | None) -> TrainResult:
        best, is_error = self.evaluator.best, self.evaluator.task.lower_is_better
        checkpoint, folder = self.checkpoints.path(self.state), self.settings.run_dir
        flag, data = trust.get_flag(self.settings.model_dump(mode="json")), self.settings.data
        if PYTHON in (self.settings.task, data.train, data.eval):
            flag = None
        return TrainResult(before, after, best, checkpoint, folder, is_error, flag)

    @property
    def _is_done(self) -> bool:
        return self.global_step >= self.settings.optim.max_steps and self.unevaluated is None

    def _stop_requested(self) -> bool:
        """Return whether a stop was requested on any rank. All ranks must call it."""
        return any_rank(self.accelerator, self.stop_request.reason is not None)

    def _evaluate(self) -> Scored | None:
        evaluation = self.evaluator.evaluate(self.global_step)
        if evaluation is not None:
            first, resize = self.evaluator.examples[:HELD_OUT_SHOWN], self.policy.prompts
            shown = [resize.with_resized_sizes(example) for example in first]
            with fail_together(self.accelerator):  # the main process writes; then all ranks save
                task = self.evaluator.task
                self.run_dir.write_evaluation(self.global_step, task, evaluation, shown)
        return evaluation

    def _evaluate_step(self, metrics: dict[str, float]) -> Scored | None:
        with self._save_on_error(), self.stop_request.finishing("evaluation"):
            evaluation = self._evaluate()
        if evaluation is not None:
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        return evaluation

    @property
    def state(self) -> RunState:
        best, skipped = self.evaluator.best, self.nonfinite_steps
        return RunState(self.global_step, best, skipped, self.unevaluated)

    def restore(self, checkpoint: Path) -> None:
        """Resume from the checkpoint that the policy's weights were loaded from."""
        state = self.checkpoints.restore(checkpoint)
        self.global_step, self.unevaluated = state.step, state.unevaluated
        self.evaluator.best, self.nonfinite_steps = state.best, state.nonfinite_steps

    def _save(self) -> None:
        with self.stopwatch("saving"):
            self.checkpoints.save(self.state)

    @contextmanager
    def _save_on_error(self) -> Iterator[None]:
        """Save the last step if the block raises ``UserError``, which it must do on all ranks."""
        try:
            yield
        except UserError:
            if self.global_step > 0 and not self.checkpoints.is_saved(self.state):
                self._save()
            raise
