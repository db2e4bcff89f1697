"""Definitions of benchmarks: all in the package are valid, and errors are named."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmark_table import build_tables

from vlm_grpo.benchmarks.definition import benchmark_names, load_benchmark
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, ImageRef


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
        # A mean is between 0 and 1, so a published number is between 0 and the scale.
        assert 0 <= published.value <= benchmark.scale


def test_every_kind_of_task_has_a_benchmark():
    tasks = {load_benchmark(name).task for name in benchmark_names()}
    assert tasks >= {
        "grounding",
        "counting",
        "ocr",
        "detection",
        "document",
        "table",
        "gui",
        "choice",
        "numeric",
        "math",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("metric: exakt", "no metric exakt .did you mean exact"),
        ("frame: permill", "no frame permill .did you mean permille"),
        ("reader: bare_cuont", "no reader bare_cuont .did you mean bare_count"),
        ("prompt: How many?", "prompt must contain .question."),
        ("average: groups", "average: groups needs groups"),
        ("script_outputs: markdwon", "no form markdwon .did you mean markdown"),
        ("script_outputs: markdown", "script_outputs needs reader: text or full_text"),
        ("average: groups\ngroups: [kind]", "average: groups needs a rule"),
        (
            "published: [{model: x, value: 1, split: all, source: y}]",
            "are of unknown splits: all",
        ),
        ("metrik: exact", "metrik: Extra inputs"),
        ("title: [", "is not valid YAML"),
        ("title: " + "[" * 1000, "is not valid YAML"),
    ],
)
def test_a_wrong_definition_is_refused_with_its_problem(tmp_path, change, message):
    lines = {"title": "X", "converter": "clevr", "task": "counting", "metric": "exact"}
    lines |= {"splits": "{val: 3}"}
    lines.pop(change.partition(":")[0], None)
    text = "\n".join([*(f"{key}: {value}" for key, value in lines.items()), change])
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_benchmark(str(path))


def test_an_unknown_benchmark_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean refcoco"):
        load_benchmark("refcocoo")


def test_tables_in_the_docs_match_the_definitions():
    text = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    # `python tests/helpers/benchmark_table.py` prints the tables.
    assert all(table in text for table in build_tables())


def test_a_verified_number_has_a_source_with_an_address():
    numbers = [p for name in benchmark_names() for p in load_benchmark(name).published]
    verified = [p for p in numbers if p.verified]
    assert verified
    assert [p.source for p in verified if not p.source.startswith("https://")] == []
