"""Reports: official metrics, intervals, tables, baselines and comparisons, by hand and by scipy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.eval.benchmark_report import (
    build_group_table,
    build_report,
    compare,
    format_comparison,
    format_report,
)
from vlm_grpo.eval.statistics import bootstrap_interval
from vlm_grpo.types import Example


def make_examples(golds: list, **meta: list) -> list[Example]:
    columns = [dict(zip(meta, values, strict=True)) for values in zip(*meta.values(), strict=True)]
    metas = columns or [{}] * len(golds)
    return [Example(f"r{i}", (), "?", g, m) for i, (g, m) in enumerate(zip(golds, metas))]  # noqa: B905


def make_report(name: str, examples: list[Example], texts: list[str], **options: Any):
    benchmark = load_benchmark(name)
    task = benchmark.load_task(**options)
    scores = [task.score(text, row) for text, row in zip(texts, examples, strict=True)]
    return build_report(benchmark, task, examples, scores)


def test_counting_report_by_hand():
    examples = make_examples([2, 2, 2, 3], kind=["simple", "simple", "complex", "complex"])
    report = make_report("tallyqa", examples, ["2", "2", "4", "many"])
    assert report.value == 50.0  # two of four
    assert report.answered == 0.75
    assert report.metrics["absolute_error"] == pytest.approx(2 / 3)  # |4 − 2| over three answers
    assert report.metrics["rmse"] == pytest.approx((4 / 3) ** 0.5)
    assert report.baseline == ("always '2'", 75.0)
    assert [(r.group, r.n, r.mean) for r in report.tables["kind"]] == [
        ("complex", 2, 0.0),
        ("simple", 2, 1.0),
    ]
    assert [(r.group, r.n) for r in report.tables["answer"]] == [("2", 3), ("3", 1)]


def test_ocrbench_is_in_points_of_a_thousand():
    examples = make_examples([["a"], ["b"]], dataset_name=["IIIT5K"] * 2, type=["Regular"] * 2)
    report = make_report("ocrbench", examples, ["it is A", "x"])
    assert report.value == 500.0
    lines = list(format_report(report, "test"))
    assert lines[0].startswith("OCRBench: ocrbench 500.0 [")
    assert "n = 2, 100.0% answered" in lines[0]
    assert lines[1].startswith("  read: the full output")
    assert "its test has 1000 examples" in lines[2]
    assert any("Qwen2.5-VL-3B-Instruct" in line and "not verified" in line for line in lines)


def test_errors_are_printed_with_three_places():
    examples = make_examples([2, 2, 3], kind=["val"] * 3)
    report = make_report("fsc147", examples, ["2", "3", "3"])
    lines = list(format_report(report))
    assert lines[0].startswith("FSC-147: mae 0.333 [0.000, 1.000] (n = 3")
    assert "  baseline, always '2': 0.333" in lines
    assert f"  {'val':<32}   0.333 [0.000, 1.000]  n = 3" in lines
    comparison = compare([0.0, 1.0, 0.0], [0.0, 0.0, 0.0], lower_is_better=True)
    line = format_comparison(comparison, report.benchmark)
    assert line.startswith("difference +0.333 [+0.000, +1.000], p = ")
    assert line.endswith("n = 3; 0 better, 1 worse)")


@pytest.mark.parametrize(
    ("name", "split", "warning"),
    [
        ("super_clevr_200", None, "its test has 200 examples; this is a part"),
        ("fsc147", "val", "its val has 1286 examples; this is a part"),
        ("fsc147", None, "its test has 1190, val has 1286 examples; this is a part"),
        ("clevr", None, None),  # its number of examples is not published
    ],
)
def test_a_report_warns_of_missing_rows_with_and_without_a_split(name, split, warning):
    report = make_report(name, make_examples([1, 2]), ["1", "2"])
    text = "\n".join(format_report(report, split))
    assert warning in text if warning else "this is a part" not in text


def test_a_report_of_all_rows_has_no_warning():
    report = make_report("super_clevr_200", make_examples([1] * 200), ["1"] * 200)
    assert "this is a part" not in "\n".join(format_report(report))


def test_ocrbench_v2_is_a_mean_of_category_means():
    kinds = ["science QA en"] * 3 + ["text recognition en"]
    categories = ["knowledge reasoning"] * 3 + ["text recognition"]
    examples = make_examples([["a"]] * 4, type=kinds, category=categories, eval=[None] * 4)
    report = make_report("ocrbench_v2", examples, ["a", "a", "x", "x"])
    # (2/3 + 0) / 2; the mean over examples would be 1/2.
    assert report.value == pytest.approx(100 / 3)


def test_grounding_report_has_sizes_and_the_whole_image_as_baseline():
    examples = make_shapes.draw_examples("grounding", 20, seed=3)
    texts = [str(row.answer["boxes"][0]) for row in examples]
    report = make_report("refcoco", examples, [*texts[:10], *["no"] * 10])
    assert report.value == 50.0
    assert report.baseline == ("the whole image", 0.0)  # no shape fills half of its image
    assert report.metrics["accuracy_above_50"] == 0.5
    assert sum(row.n for row in report.tables["size"]) == 20


def test_a_corpus_metric_has_no_interval_and_no_values_of_examples():
    shapes = make_shapes.draw_examples("grounding", 4, seed=3)
    task = load_benchmark("coco").load_task()
    report = make_report("coco", shapes, [task.gold(row) for row in shapes])
    assert report.value == pytest.approx(100.0)
    assert (report.interval, report.values, report.tables) == (None, None, {})


def test_a_metric_that_is_undefined_on_all_examples_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("title: Errors\ntask: counting\nmetric: absolute_error\n")
    with pytest.raises(UserError, match="absolute_error of Errors is undefined"):
        make_report(str(path), make_examples([1, 2]), ["x", "y"])


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(0).binomial(1, 0.7, 200).astype(float)
    ours = bootstrap_interval(values, seed=0)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=9999, method="percentile",
                             rng=np.random.default_rng(1)).confidence_interval  # fmt: skip
    # Both are Monte Carlo: a mean of 200 draws moves in steps of 1/200.
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_interval_of_group_means_is_wide_if_a_group_is_small():
    rng = np.random.default_rng(0)
    large, small = rng.binomial(1, 0.5, 2000).astype(float), np.array([0.0, 1.0, 0.0, 1.0])
    low, high = bootstrap_interval(large, small, seed=0)
    # The small group's standard error is 0.25, halved by the mean of two: about ±1.96 × 0.125.
    assert 0.35 < high - low < 0.55


def test_groups_with_numbers_are_sorted_by_size():
    table = build_group_table([1.0, 0.0, 1.0], ["10", "9", "unknown"])
    assert [row.group for row in table] == ["9", "10", "unknown"]


def test_equal_outputs_have_no_difference():
    values = [0.0, 1.0] * 50
    comparison = compare(values, values)
    assert (comparison.difference, comparison.low, comparison.high, comparison.p_value) == (
        0.0,
        0.0,
        0.0,
        1.0,
    )
    assert (comparison.better, comparison.worse) == (0, 0)


def test_comparison_is_paired():
    # Each example gains 0.01, which an unpaired test could not detect in this spread.
    rng = np.random.default_rng(0)
    base = rng.normal(0, 10, 100)
    comparison = compare((base + 0.01).tolist(), base.tolist())
    assert comparison.difference == pytest.approx(0.01)
    assert comparison.p_value < 0.001
    assert comparison.better == 100


@pytest.mark.parametrize("wins", [35, 30, 26])
def test_comparison_of_binary_scores_agrees_with_the_sign_test(wins):
    # 50 of 500 examples differ; the exact sign test applies to them.
    first = [1.0] * wins + [0.0] * (50 - wins) + [1.0] * 450
    second = [0.0] * wins + [1.0] * (50 - wins) + [1.0] * 450
    comparison = compare(first, second)
    exact = stats.binomtest(wins, 50).pvalue
    assert comparison.p_value == pytest.approx(exact, rel=1e-9)
    assert (comparison.better, comparison.worse, comparison.n) == (wins, 50 - wins, 500)
    assert f"(McNemar, n = 500; {wins} better" in format_comparison(
        comparison, load_benchmark("tallyqa")
    )


def test_comparison_has_the_nominal_level():
    """Without a difference p < 0.05 in about 5 % of trials (binomial, 200 trials: < 11 %)."""
    rng = np.random.default_rng(0)
    trials = rng.normal(size=(200, 2, 60)).tolist()
    small = [compare(first, second).p_value < 0.05 for first, second in trials]
    assert 0.01 <= np.mean(small) < 0.11


def test_the_same_seed_gives_the_same_report():
    rng = random.Random(0)
    examples = make_examples([rng.randint(1, 5) for _ in range(50)], kind=["a"] * 50)
    texts = [str(rng.randint(1, 5)) for _ in range(50)]
    assert make_report("tallyqa", examples, texts) == make_report("tallyqa", examples, texts)
