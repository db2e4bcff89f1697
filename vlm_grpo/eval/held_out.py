"""Evaluation on held-out examples during training."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_grpo.config.run import Settings
from vlm_grpo.data.run_data import get_held_out_task
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.eval.evaluate import evaluate_policy
from vlm_grpo.eval.scored import Scored
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example


class HeldOutEvaluator:
    """An evaluator of a policy on held-out examples that remembers the best result.

    Args:
        strategy: the policy's weights; they are gathered for an evaluation.
        task: the run's task; the examples are scored with it or with that of
            ``evaluation.benchmark``.
        examples: the held-out examples; may be empty. Those that the model cannot use are left out
            or an error, as ``data.on_bad_row`` says.
        settings: the run's settings.
        scorer: scores the outputs.

    Attributes:
        task: the task that scores the examples.
        best: the best value of the primary metric and the number of steps after which it was
            reached; None before the first evaluation.
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
        self.best: tuple[float, int] | None = None

    @property
    def best_step(self) -> int | None:
        """Number of steps after which the primary metric was best; None before any evaluation."""
        return None if self.best is None else self.best[1]

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after ``step`` steps."""
        every, settings = self.settings.evaluation.every, self.settings
        is_last = step in settings.phase_ends
        return bool(self.examples) and (is_last or (bool(every) and step % every == 0))

    def evaluate(self, step: int) -> Scored | None:
        """Evaluate the policy after ``step`` steps; None without held-out examples.

        Raises:
            UserError: an example cannot be read.
        """
        if not self.examples:
            return None
        with self.policy.stopwatch("evaluation"), self.strategy.gathered():
            evaluation = evaluate_policy(
                self.policy, self.task, self.examples, self.settings, self.scorer
            )
        if evaluation.is_better_than(None if self.best is None else self.best[0]):
            self.best = (evaluation.value, step)
        return evaluation

    def first_examples(self, count: int) -> list[Example]:
        """Return the first examples, with their images' resized sizes."""
        return [
            self.policy.prompts.with_resized_sizes(example) for example in self.examples[:count]
        ]
