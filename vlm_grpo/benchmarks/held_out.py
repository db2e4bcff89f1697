"""What held-out examples are scored by."""

from __future__ import annotations

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.run import Settings
from vlm_grpo.task import Task


def held_out_task(settings: Settings, task: Task) -> Task:
    """The task that held-out examples are scored by: the run's own, or a benchmark's.

    A benchmark is asked with the run's task options where it is of the same task, and otherwise
    with those that every task has, so that the policy is asked as it was trained.

    Args:
        settings: the run's.
        task: the run's task, with the frame of the policy.

    Raises:
        UserError: ``evaluation.benchmark`` names none.
    """
    if settings.evaluation.benchmark is None:
        return task
    benchmark = load_benchmark(settings.evaluation.benchmark)
    options = settings.task_options
    if benchmark.task != settings.task_name:
        options = {name: options[name] for name in ("tags", "thinking") if name in options}
    return benchmark.load_task(task.frame, **options)
