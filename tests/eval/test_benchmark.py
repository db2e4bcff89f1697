"""Benchmarks: reports by hand and by scipy, evaluations resumed after a stop, files of outputs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlm_grpo import Settings, UserError, load_settings
from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.eval import benchmark as reports
from vlm_grpo.eval.benchmark import Report, compare, evaluate_benchmark, format_report
from vlm_grpo.eval.prediction_log import PredictionLog
from vlm_grpo.model.loading import get_model_source
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.types import Completion, Example
from vlm_grpo.utils.jsonl import read_rows


def make_settings(tmp_path: Path, name: str = "run") -> Settings:
    overrides = ["data.eval_limit=40", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", overrides)


def make_examples(golds: list, **meta: list) -> list[Example]:
    metas = [{name: values[i] for name, values in meta.items()} for i in range(len(golds))]
    return [Example(f"r{i}", (), "?", golds[i], own) for i, own in enumerate(metas)]


def make_report(name: str, examples: list[Example], texts: list[str]) -> Report:
    benchmark = load_benchmark(name)
    task = benchmark.load_task()
    scores = [task.score(text, row) for text, row in zip(texts, examples, strict=True)]
    outputs = [*map(Completion.from_text, texts)]
    return reports.build_report(benchmark, task, examples, outputs, scores)


def test_reports_of_counting_and_of_choices_by_hand():
    examples = make_examples([2, 2, 2, 3], kind=["simple", "simple", "complex", "complex"])
    report = make_report("tallyqa", examples, ["2", "2", "4", "many"])
    assert (report.value, report.scored.metrics["answered"]) == (50.0, 0.75)  # two of four
    assert report.metrics["absolute_error"] == pytest.approx(2 / 3)  # |4 − 2| over three answers
    assert report.metrics["rmse"] == pytest.approx((4 / 3) ** 0.5)
    assert report.baseline == ("always '2'", 75.0)
    kinds = [(r["group"], r["n"], r["mean"]) for r in report.tables["kind"]]
    assert kinds == [("complex", 2, 0.0), ("simple", 2, 1.0)]
    assert [(r["group"], r["n"]) for r in report.tables["answer"]] == [("2", 3), ("3", 1)]
    table = reports.build_group_table([1.0, 0.0, 1.0], ["10", "9", "unknown"])
    assert [row["group"] for row in table] == ["9", "10", "unknown"]  # by size
    # That of choices has the share of letters that begin a word.
    examples = make_examples([{"options": ["cat", "dog"], "answer": "dog"}] * 4, task=["x"] * 4)
    report = make_report("blink", examples, ["B", "Based on it", "As such", "Sorry"])
    share = "  letters read from the start of a word: 50.0%, such as 'Based on it'"
    assert share in list(format_report(report))


def test_ocrbench_is_in_points_of_a_thousand_and_errors_have_three_places(tmp_path):
    examples = make_examples([["a"], ["b"]], dataset_name=["IIIT5K"] * 2, type=["Regular"] * 2)
    report = make_report("ocrbench", examples, ["it is A", "x"])
    assert report.value == 500.0
    lines = list(format_report(report))
    assert lines[0].startswith("OCRBench: ocrbench 500.0 [")
    assert "n = 2, 100.0% answered" in lines[0]
    assert lines[1].startswith("  read: the full output")
    assert "its test has 1000 examples" in lines[2]
    assert any("Qwen2.5-VL-3B-Instruct" in line and "not verified" in line for line in lines)
    examples = make_examples([2, 2, 3], kind=["val"] * 3)
    report = make_report("fsc147", examples, ["2", "3", "3"])
    lines = list(format_report(report))
    assert lines[0].startswith("FSC-147: mae 0.333 [0.000, 1.000] (n = 3")
    assert "  baseline, always '2': 0.333" in lines
    assert f"  {'val':<32}   0.333 [0.000, 1.000]  n = 3" in lines
    comparison = compare(report.benchmark, [0.0, 1.0, 0.0], [0.0, 0.0, 0.0])
    line = reports.format_comparison(report.benchmark, comparison)
    assert line.startswith("difference +0.333 [+0.000, +1.000], p = ")
    assert line.endswith("n = 3; 0 better, 1 worse)")
    path = tmp_path / "x.yaml"
    path.write_text("title: Errors\ntask: counting\nmetric: absolute_error\n")
    with pytest.raises(UserError, match="absolute_error of Errors is undefined"):
        make_report(str(path), make_examples([1, 2]), ["x", "y"])


def test_a_report_warns_of_missing_rows():
    for name, count, warning in (
        ("super_clevr_200", 200, None),
        ("fsc147", 2, "its test has 1190, val has 1286 examples; this is a part"),
        ("clevr", 2, None),  # its number of examples is not published
    ):
        report = make_report(name, make_examples([1] * count), ["1"] * count)
        assert (warning or "") in (text := "\n".join(format_report(report)))
        assert ("this is a part" in text) == bool(warning)


def test_grounding_report_has_sizes_and_the_whole_image_as_baseline():
    examples = make_shapes.draw_examples("grounding", 20, seed=3)
    texts = [str(row.answer["boxes"][0]) for row in examples]
    report = make_report("refcoco", examples, [*texts[:10], *["no"] * 10])
    assert report.value == 50.0
    assert report.baseline == ("the whole image", 0.0)  # no shape fills half of its image
    assert report.metrics["accuracy_above_50"] == 0.5
    assert sum(row["n"] for row in report.tables["size"]) == 20
    task = load_benchmark("coco").load_task()
    report = make_report("coco", examples, [task.gold(row) for row in examples])
    assert report.value == pytest.approx(100.0)
    # A metric of the corpus has no interval and no values of examples.
    assert (report.interval, report.values, report.tables) == (None, None, {})


def test_comparison_is_paired():
    benchmark, values = load_benchmark("tallyqa"), [0.0, 1.0] * 50
    equal = compare(benchmark, values, values)
    assert (equal["low"], equal["high"], equal["p_value"]) == (0, 0, 1)
    assert (equal["better"], equal["worse"]) == (0, 0)
    # Each example gains 0.01, which an unpaired test could not detect in this spread.
    base = np.random.default_rng(0).normal(0, 10, 100)
    found = compare(benchmark, (base + 0.01).tolist(), base.tolist())
    assert found["difference"] == pytest.approx(0.01)
    assert (found["p_value"] < 0.001, found["better"]) == (True, 100)
    with pytest.raises(UserError, match="no example has an answer in both outputs"):
        compare(benchmark, [None, 1.0], [1.0, None])
    first, second = [1.0] * 3 + [0.0] * 2 + [1.0] * 45, [0.0] * 3 + [1.0] * 47
    line = reports.format_comparison(benchmark, compare(benchmark, first, second))
    assert "(McNemar, n = 50; 3 better, 2 worse)" in line


@pytest.fixture
def benchmark(tmp_path: Path) -> str:
    path = tmp_path / "shapes.yaml"
    path.write_text("title: Shapes\ntask: counting\nmetric: exact\nsplits: {test: 40}\n")
    return str(path)


def test_a_stopped_evaluation_resumes_with_the_same_result(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_grpo.eval.models.CHUNK_EXAMPLES", 16)  # chunks of 16, 16 and 8
    whole, stopped = (make_settings(tmp_path, name) for name in ("whole", "stopped"))
    (expected,) = evaluate_benchmark(benchmark, whole)
    append = PredictionLog.append

    def append_and_stop(log: PredictionLog, *arguments: Any) -> None:
        append(log, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PredictionLog, "append", append_and_stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate_benchmark(benchmark, stopped)
    assert len(read_rows(stopped.run_dir / "model" / "predictions-0.jsonl")) == 16
    (resumed,) = evaluate_benchmark(benchmark, stopped)
    assert resumed.values == expected.values
    for name in ("model/predictions.jsonl", "results.json"):
        assert (stopped.run_dir / name).read_text() == (whole.run_dir / name).read_text()
    content = json.loads((whole.run_dir / "results.json").read_text())
    assert content["model"]["value"] == pytest.approx(expected.value)
    assert content["comparison"] is None


def test_the_written_predictions_score_the_same_again(tmp_path):
    definition = tmp_path / "boxes.yaml"
    definition.write_text("title: Boxes\ntask: grounding\nmetric: accuracy_50\n")
    overrides = ["data.eval_limit=40", f"output_dir={tmp_path / 'runs'}"]
    settings = load_settings("grounding", overrides)
    (report,) = evaluate_benchmark(str(definition), settings)
    assert 0 < report.value < 100
    path = settings.run_dir / "model" / "predictions.jsonl"
    # The embedded model writes boxes in pixels of the resized image.
    again = reports.score_benchmark(str(definition), settings, path, frame=FRAMES["resized"])
    assert again.values == report.values
    files = [settings.run_dir / f"results{part}.json" for part in ("", "-predictions")]
    saved = [json.loads(file.read_text()) for file in files]
    assert saved[0]["model"]["value"] == saved[1]["predictions"]["value"] == report.value


def test_a_checkpoint_is_compared_with_its_model(benchmark, tmp_path, capsys):
    copy = tmp_path / "checkpoint"
    shutil.copytree(get_model_source("embedded"), copy)
    base, equal = evaluate_benchmark(benchmark, make_settings(tmp_path), copy)
    assert base.values == equal.values
    assert "difference +0.0" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs" / "run" / "results.json").read_text())
    assert results["comparison"]["n"] == 40
    assert results["checkpoint"] == results["model"]
