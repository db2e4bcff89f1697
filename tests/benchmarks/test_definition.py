"""Definitions of benchmarks: all in the package are valid, errors are named, tasks adapted."""

import importlib
import pickle
from dataclasses import field
from pathlib import Path

import pytest
import small_tasks
from benchmark_table import build_tables

from vlm_grpo import UserError, load_task
from vlm_grpo.benchmarks.definition import benchmark_names, build_benchmark_task, load_benchmark
from vlm_grpo.tasks.counting import Counting
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils import trust


@pytest.mark.parametrize("name", benchmark_names())
def test_every_definition_is_valid(name):
    benchmark = load_benchmark(name)
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{benchmark.converter}").convert
    assert benchmark.task in converter.tasks
    image = ImageRef(name="a", size=(100, 100), resized_size=(100, 100), data=b"")
    answer = {"boxes": [[0, 0, 9, 9]], "options": ["a", "b"], "answer": "a"}
    assert benchmark.load_task().prompt(Example("a", (image,), "?", answer))
    assert benchmark.load_task().primary_metric == benchmark.metric
    assert benchmark.asked, "it says what models were asked to write"
    for published in benchmark.published:
        assert published.source, "a published number has a source"
        assert not published.verified or published.source.startswith("https://")
        # A mean is between 0 and 1, so a published number is between 0 and the scale.
        assert 0 <= published.value <= benchmark.scale


def test_a_wrong_definition_and_an_unknown_name_are_refused_with_their_problem(tmp_path):
    lines = ["title: X", "converter: clevr", "task: counting", "metric: exact", "splits: {val: 3}"]
    path = tmp_path / "x.yaml"
    for change, message in (
        ("metric: exakt", "no metric exakt .did you mean exact"),
        ("reader: bare_cuont", "no reader bare_cuont .did you mean bare_count"),
        ("prompt: How many?", "prompt must contain .question."),
        ("published: [{model: x, value: 1, split: all, source: y}]", "of unknown splits: all"),
        ("metrik: exact", "metrik: Extra inputs"),
        ("title: [", "is not valid YAML"),
        ("title: " + "[" * 1000, "is not valid YAML"),
    ):
        kept = [line for line in lines if line.split(":")[0] != change.split(":")[0]]
        path.write_text("\n".join([*kept, change]))
        with pytest.raises(UserError, match=message):
            load_benchmark(str(path))
    with pytest.raises(UserError, match="did you mean refcoco"):
        load_benchmark("refcocoo")


def test_tables_in_the_docs_match_the_definitions():
    text = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    # `python tests/helpers/benchmark_table.py` prints the tables.
    assert all(table in text for table in build_tables())


def test_the_prompt_of_a_benchmark_is_in_place_of_the_tasks_own_instruction():
    example = Example("a", (), "What {is} it?", ["x"])
    prompt = load_benchmark("docvqa").load_task(tags=True).prompt(example)
    assert "What {is} it? Answer the question using a single word or phrase." in prompt
    assert prompt.endswith("inside <answer> </answer>.")
    assert "Answer with the text alone." in load_task("ocr").prompt(example)
    assert load_benchmark("ocrbench").load_task().prompt(example) == example.question


class Fixed(Counting):
    """A task with a field that its constructor does not take."""

    total: float = field(init=False, default=1.0)


def test_a_benchmark_of_a_task_with_a_fixed_field_reaches_another_process():
    task = build_benchmark_task(Fixed, metrics=("exact",))(tags=True)
    copy = pickle.loads(pickle.dumps(task))
    assert (copy.tags, copy.total) == (True, 1.0)


def test_an_error_metric_of_a_users_task_is_one_in_its_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_everything", True)
    path = tmp_path / "x.yaml"
    for metric, is_error in (("error", True), ("near", False)):
        path.write_text(f"title: X\ntask: {small_tasks.__file__}:Distance\nmetric: {metric}\n")
        benchmark = load_benchmark(str(path))
        assert benchmark.lower_is_better == benchmark.load_task().lower_is_better == is_error
