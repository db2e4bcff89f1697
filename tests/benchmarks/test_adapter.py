"""Tasks of benchmarks: the prompt, error metrics, and means over groups."""

from __future__ import annotations

import pickle
from dataclasses import field

import pytest

from vlm_grpo.benchmarks.adapter import build_benchmark_task, mean_over_groups
from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.task.registry import load_task
from vlm_grpo.tasks.counting import Counting
from vlm_grpo.types import Example


def test_the_prompt_of_a_benchmark_contains_the_question():
    task = load_benchmark("docvqa").load_task(tags=True)
    prompt = task.prompt(Example("a", (), "What {is} it?", ["x"]))
    assert "What {is} it? Answer the question using a single word or phrase." in prompt
    assert prompt.endswith("inside <answer> </answer>.")


def test_a_benchmark_leaves_out_the_tasks_own_instruction():
    example = Example("a", (), "What is it?", ["x"])
    assert "Answer with the text alone." in load_task("ocr").prompt(example)
    assert load_benchmark("ocrbench").load_task().prompt(example) == "What is it?"


class Fixed(Counting):
    """A task with a field that its constructor does not take."""

    total: float = field(init=False, default=1.0)


def test_a_benchmark_of_a_task_with_a_fixed_field_reaches_another_process():
    task = build_benchmark_task(Fixed, metrics=("exact",))(tags=True)
    copy = pickle.loads(pickle.dumps(task))
    assert (copy.tags, copy.total) == (True, 1.0)


def test_an_error_metric_of_a_users_task_is_one_in_its_benchmark(tmp_path):
    (tmp_path / "far.py").write_text(
        "from vlm_grpo.task import Task, reward\n\n"
        "class Far(Task):\n    primary_metric = 'distance'\n    lower_is_better = True\n\n"
        "    def parse(self, text, example):\n        return float(text)\n\n"
        "    def write(self, answer, example):\n        return str(answer)\n\n"
        "    @reward()\n    def distance(self, answer, example):\n        return answer\n\n"
        "    @reward()\n    def near(self, answer, example):\n        return -answer\n"
    )
    path = tmp_path / "x.yaml"
    for metric, is_error in (("distance", True), ("near", False)):
        path.write_text(f"title: X\ntask: {tmp_path / 'far.py'}\nmetric: {metric}\n")
        benchmark = load_benchmark(str(path))
        assert benchmark.lower_is_better == benchmark.load_task().lower_is_better == is_error


def test_a_mean_over_groups_weights_groups_equally():
    # (1 + 1 + 0) / 3 in the first group and 0 in the second.
    assert mean_over_groups([1, 1, 0, 0], ["a", "a", "a", "b"]) == pytest.approx(1 / 3)
