"""Evaluate on held-out examples, during training and after it, or outputs of any model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.held_out import get_held_out_task
from vlm_grpo.data.loading import build_scorer, load_data, load_examples, load_split
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.data.objects import Objects, Rows, TaskObject
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.eval.generate import generate_runs
from vlm_grpo.eval.models import (
    EvaluatedModel,
    LocalModel,
    check_weights,
    load_evaluated_model,
    name_outputs,
)
from vlm_grpo.eval.outputs import read_outputs
from vlm_grpo.eval.prediction_log import PredictionLog, open_log
from vlm_grpo.eval.scored import Scored, summarize
from vlm_grpo.eval.tool_gain import compare_tools
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.resolve import find_checkpoint
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import RESIZED
from vlm_grpo.task.scorer import FailureGuard, RewardScorer
from vlm_grpo.types import Completion, Example, Score


def evaluate_model(
    model: EvaluatedModel,
    task: Task,
    examples: Sequence[Example],
    scorer: RewardScorer,
    log: PredictionLog | None = None,
) -> Scored:
    """Generate and score ``evaluation.samples`` completions of each example.

    The ranks share the examples; each returns the evaluation of all, or raises ``UserError``. The
    completions of an example depend only on the seed and on the example's index. Those of episodes
    are compared with completions without tools.
    """
    runs = generate_runs(model, task, examples, log)
    scored = [summarize(*run, score_all(*run, scorer), model.settings.seed) for run in runs]
    return compare_tools(*scored)


def score_all(
    task: Task, examples: Sequence[Example], outputs: Sequence[Completion], scorer: RewardScorer
) -> list[Score]:
    """Score the outputs of ``generate_all``, shared among the ranks; each returns all."""
    state = initialize_distributed()
    rank, ranks, count = state.process_index, state.num_processes, len(outputs) // len(examples)
    items = [example for example in examples for _ in range(count)]
    own = [index for index in range(len(outputs)) if index // count % ranks == rank]
    found: list[Score] = []
    with fail_together(state):  # each completion is scored once: a judge costs time and money
        groups = [index // count for index in own]
        texts, turns = [outputs[i].text for i in own], [outputs[i].turns for i in own]
        found = scorer(task, texts, [items[i] for i in own], groups=groups, turns=turns)
    by_index = dict(gather_object(list(zip(own, found, strict=True))))
    scores = [by_index[index] for index in range(len(outputs))]
    FailureGuard().check(task, scores, items)
    return scores


def evaluate(
    settings: Settings,
    checkpoint: str | Path | None = None,
    server: Endpoint | str | None = None,
    *,
    task: TaskObject | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
) -> Scored:
    """Evaluate the recipe's model, a checkpoint or a server on the recipe's held-out examples.

    The predictions are written to the folder ``evaluation`` of the run. Outputs of a server are
    written as they come, and a stopped evaluation of it resumes from them.

    Args:
        settings: settings with ``data.eval``.
        checkpoint: a run, whose newest checkpoint is evaluated, ``RUN@step``, ``RUN@best``, or the
            folder of a checkpoint; None: the model before training.
        server: address of a model, such as ``"http://localhost:8000/v1"`` or an ``Endpoint``, which
            is asked instead of loading weights.
        task, data, held_out: Python objects in place of those of the settings, as for ``train``.

    Raises:
        UserError: the recipe has no ``data.eval``, the model or the data cannot be loaded, or the
            server cannot be used or gave no output for some examples.
    """
    objects = Objects(task, data, held_out)
    settings = objects.name_in(check_settings(settings))
    if not settings.data.has_held_out:
        raise UserError("nothing to evaluate on: set data.eval to a dataset")
    weights = find_checkpoint(checkpoint)
    check_weights(weights, server)
    run_task = load_run_task(settings, objects)
    if settings.data.eval is None:
        _, examples = load_data(settings, run_task, objects)
    else:
        examples = load_split(settings, get_held_out_task(settings, run_task), "eval", objects)
    model = load_evaluated_model(settings, weights, server)
    scoring_task = get_held_out_task(settings, model.prompts.adapt(run_task))
    folder, name = settings.run_dir / "evaluation", name_outputs(model, weights)
    log = None
    if server is not None:
        log = open_log(folder / name, model, weights, scoring_task, examples)
    state = initialize_distributed()
    with build_scorer(settings, state.process_index) as scorer:
        evaluation = evaluate_model(model, scoring_task, examples, scorer, log)
    if state.is_main_process:
        evaluation.write(folder / f"{name}.jsonl")
    return replace(evaluation, path=folder / f"{name}.jsonl")


def score_outputs(task: Task, data: DataSettings, path: Path) -> tuple[Scored, int]:
    """Score the outputs of any model for ``data.train`` by a task; see ``read_outputs``.

    Also return the number of examples that have no output in the file.
    """
    loaded = load_examples(data.train, task, data)
    examples, outputs = read_outputs(path, loaded, task.frame == RESIZED)
    with RewardScorer() as scorer:
        scores = score_all(task, examples, outputs, scorer)
    return summarize(task, examples, outputs, scores, 0), len(loaded) - len(examples)


class HeldOutEvaluator:
    """An evaluator of a policy on held-out examples that remembers the best result.

    The examples are scored by the task of ``evaluation.benchmark``, if there is one. Those that the
    model cannot use are left out or an error, as ``data.on_bad_row`` says.
    """

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        examples: Sequence[Example],
        settings: Settings,
        scorer: RewardScorer,
    ) -> None:
        self.strategy, self.settings = strategy, settings
        self.policy: Policy = strategy.policy
        self.task, self.scorer = get_held_out_task(settings, task), scorer
        skip = settings.data.on_bad_row == "skip"
        self.examples = self.policy.prompts.select_usable(examples, self.task, skip)
        # The best value of the primary metric, and the number of steps before it.
        self.best: tuple[float, int] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after ``step`` steps."""
        every, is_last = self.settings.evaluation.every, step in self.settings.phase_ends
        return bool(self.examples) and (is_last or (bool(every) and step % every == 0))

    def evaluate(self, step: int) -> Scored | None:
        """Evaluate the policy after ``step`` steps; None without held-out examples."""
        if not self.examples:
            return None
        with self.policy.stopwatch("evaluation"), self.strategy.gathered():
            model = LocalModel(self.policy, self.settings)
            evaluation = evaluate_model(model, self.task, self.examples, self.scorer)
        if evaluation.is_better_than(None if self.best is None else self.best[0]):
            self.best = (evaluation.value, step)
        return evaluation
