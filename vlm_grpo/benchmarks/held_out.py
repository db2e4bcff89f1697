"""The task that scores the held-out examples of a run."""

from __future__ import annotations

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.run import Settings
from vlm_grpo.task import Task


def get_held_out_task(settings: Settings, task: Task) -> Task:
    """Return the task that scores the held-out examples: the run's, or that of a benchmark.

    A benchmark with the run's task gets the run's task options; another one gets only the options
    that every task has. The prompt has the same form as in training: tags and thinking are those of
    the run, whatever the models of the benchmark's published results were asked to write.

    Args:
        settings: settings of the run.
        task: task of the run, with the coordinate frame of the policy.

    Raises:
        UserError: there is no benchmark with the name in ``evaluation.benchmark``.
    """
    if settings.evaluation.benchmark is None:
        return task
    benchmark = load_benchmark(settings.evaluation.benchmark)
    options = settings.task_options if benchmark.task == settings.task_name else {}
    options = {**options, "tags": task.tags, "thinking": task.thinking}
    return benchmark.load_task(task.frame, **options)
