"""The task that scores held-out examples: a benchmark's, with the task options of the run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.run_data import get_held_out_task
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import ThinkingTags

ROW = Example("a", (), "How many cups?", 3)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a counting run that is evaluated on a benchmark of counting."""
    path = tmp_path / "far.yaml"
    path.write_text(
        "title: Far\ntask: counting\nmetric: absolute_error\nvariants: [exact]\n"
        'prompt: "Look. {question}"\n'
    )
    return load_settings("counting", [f"evaluation.benchmark={path}", "task_options.tags=true"])


@pytest.fixture
def run_task() -> Task:
    tags = ThinkingTags("[THINK]", "[/THINK]", is_open=True, is_native=True)
    return load_task("counting", tags=True, frame=FRAMES["permille"], thinking_tags=tags)


def test_without_a_benchmark_it_is_the_task_of_the_run(run_task: Task) -> None:
    assert get_held_out_task(load_settings("counting"), run_task) is run_task


def test_a_benchmark_gets_the_options_and_the_frame_of_the_run(
    settings: Settings, run_task: Task
) -> None:
    task = get_held_out_task(settings, run_task)
    assert task.prompt(ROW) == f"Look. {run_task.prompt(ROW)}"
    assert (task.tags, task.frame.name) == (True, "permille")
    assert task.read("4?[/THINK]<answer>3</answer>", ROW) == 3
    assert task.read("<answer>3</answer>", ROW) is None  # within the thinking
    assert (task.primary_metric, task.lower_is_better) == ("absolute_error", True)


def test_a_benchmark_of_another_task_gets_the_common_options(
    settings: Settings, run_task: Task
) -> None:
    other = settings.model_copy(update={"task": "ocr", "task_options": {"tags": True, "x": 1}})
    assert get_held_out_task(other, run_task).tags


def test_a_run_without_tags_is_not_asked_for_those_of_the_benchmark(settings: Settings) -> None:
    evaluation = settings.evaluation.model_copy(update={"benchmark": "super_clevr_200"})
    plain = settings.model_copy(update={"evaluation": evaluation, "task_options": {}})
    task = get_held_out_task(plain, load_task("counting"))
    assert (task.tags, task.thinking) == (False, False)
    assert load_benchmark("super_clevr_200").load_task().tags


def test_the_task_of_a_benchmark_can_be_pickled(settings: Settings, run_task: Task) -> None:
    task = get_held_out_task(settings, run_task)
    unpickled = pickle.loads(pickle.dumps(task))  # as for reward workers
    assert unpickled.score("<answer>3</answer>", ROW) == task.score("<answer>3</answer>", ROW)
    assert unpickled.corpus_metrics([3], [ROW]) == task.corpus_metrics([3], [ROW])


def test_an_unknown_benchmark_is_refused(settings: Settings, run_task: Task) -> None:
    evaluation = settings.evaluation.model_copy(update={"benchmark": "tallyqaa"})
    unknown = settings.model_copy(update={"evaluation": evaluation})
    with pytest.raises(UserError, match="did you mean tallyqa"):
        get_held_out_task(unknown, run_task)
