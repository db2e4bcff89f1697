"""The summary of an evaluation, of several samples by an enumeration of all subsets, and files."""

import itertools
import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_tasks import Distance

from vlm_grpo import Task, load_task
from vlm_grpo.data.mixed_task import Mixed
from vlm_grpo.eval import scored
from vlm_grpo.eval.scored import Row, Scored
from vlm_grpo.eval.tool_gain import compare_tools
from vlm_grpo.report.run import measure_change
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Completion, Example

COUNTING = load_task("counting")
COUNTS = [Example(f"c/{n}", (), "How many?", n, source="c") for n in range(6)]
ERRORS = [Example(f"e/{n}", (), "How far?", n, source="e") for n in range(2)]
MIXED = Mixed(members={"c": COUNTING, "e": Distance()})


def evaluate(task: Task, examples: list[Example], texts: list[str]) -> Scored:
    items = [e for e in examples for _ in range(len(texts) // len(examples))]
    with RewardScorer() as scorer:
        outputs = [*map(Completion.from_text, texts)]
        return scored.summarize(task, examples, outputs, scorer(task, texts, items), 0)


def test_a_value_is_better_if_higher_or_for_an_error_if_lower():
    for is_error in (False, True):
        values = (2.0, 3.0, math.nan)
        low, high, unknown = (Scored((), "x", {"x": value}, is_error) for value in values)
        assert (low.is_better_than(3.0), high.is_better_than(2.0)) == (is_error, not is_error)
        assert low.is_better_than(None)
        assert not low.is_better_than(2.0)
        assert not unknown.is_better_than(None)


def test_a_lone_surrogate_in_an_answer_can_be_written(tmp_path):
    answer = "\ud83d"  # from JSON in an output; UTF-8 cannot encode it
    row = Row(id="1", output="", answer=answer, reward=1.0, rewards={}, metrics={})
    Scored((row,), "x", {"x": 1}).write(tmp_path / "p.jsonl")
    assert json.loads((tmp_path / "p.jsonl").read_text()) == row


def test_sources_count_equally_and_keep_their_own_metrics():
    examples = [COUNTS[0], ERRORS[0], *COUNTS[1:], ERRORS[1]]
    texts = ["0", "0.25", "1", "2", "3", "9", "9", "1.5"]  # 4 of 6 counts; errors 0.25 and 0.5
    found = evaluate(MIXED, examples, texts)
    counts = evaluate(COUNTING, COUNTS, ["0", "1", "2", "3", "9", "9"])
    assert found.primary_metric == "score"
    assert found.value == pytest.approx((4 / 6 + 1 - 0.375) / 2)
    own = {n.removeprefix("c/"): v for n, v in found.metrics.items() if n.startswith("c/")}
    assert {**own, "unscorable": 0} == counts.metrics
    assert (found.metrics["e/error"], found.metrics["answered"]) == (0.375, 1.0)
    low, high = found.interval
    assert low < found.value < high
    kept = [(row.get("source"), row["id"]) for row in found.rows]
    assert kept == [(example.source, example.id) for example in examples]
    alone = evaluate(MIXED, [COUNTS[0], ERRORS[0]], ["0", "0.25"])
    # The mean of 1 and 1 - 0.25, without variance.
    assert (alone.value, alone.interval) == (0.875, (0.875, 0.875))


def test_tools_gain_and_harm_by_the_primary_metric_of_each_source():
    examples = [*COUNTS[:4], *ERRORS]
    plain = evaluate(MIXED, examples, [*"0923", "0.5", "1"])
    found = compare_tools(evaluate(MIXED, examples, [*"0199", "0.25", ""]), plain)
    # One count becomes right and two wrong, and one error falls by 0.25; the other has no answer.
    assert found.metrics["tools/gain"] == (1 + 0.25) / 5
    assert found.metrics["tools/harm"] == 2 / 5
    name = f"e/{Distance.primary_metric}_without_tools"
    assert (found.metrics["c/exact_without_tools"], found.metrics[name]) == (3 / 4, 0.25)
    assert [*map(found.is_error, ("tools/gain", "tools/harm", name))] == [False, True, True]
    assert compare_tools(plain) is plain
    silent = evaluate(MIXED, examples, [*"0199", "0.25", ""])
    rows = [{**row, "metrics": {**row["metrics"], "tools/called": 0.0}} for row in silent.rows]
    found = compare_tools(replace(silent, rows=tuple(rows)), plain)  # nothing was called
    parts = [found.metrics[f"tools/{name}"] for name in ("gain", "harm", "prompt")]
    assert parts == [0, 0, (1 + 0.25 - 2) / 5]


def test_a_mixture_says_what_each_source_has_and_keeps_it_in_its_files(tmp_path):
    examples, texts = [*COUNTS, *ERRORS], [*"012399", "0.25", ""]
    found = evaluate(MIXED, examples, texts)
    score, counts, errors = found.lines
    assert re.fullmatch(r"score \d\d\.\d% \[.*%\] \(n = 7\)", score)  # one has no error
    assert re.fullmatch(r"c/exact 66\.7% \[.*%\] \(n = 6\)", counts)
    assert errors == "e/error 0.250 [0.250, 0.250] (n = 1)"
    assert found.get_n("c/rmse") == 6  # of the corpus
    found.write(tmp_path / "a.jsonl")
    assert scored.read_scored(tmp_path / "a.jsonl").lines == found.lines
    before = evaluate(MIXED, examples, [*"019999", "0.5", "1"])
    change: Any = measure_change(before, found, "score")
    assert change.n == 7
    # Of the sources: two of six counts more, and an error that is lower by 0.25.
    assert change.difference == pytest.approx((2 / 6 + 0.25) / 2)
    low, high = change.difference_interval
    assert 0.125 <= low < change.difference < high  # the error's difference does not vary
    other = evaluate(Mixed(members={"c": COUNTING}), COUNTS, [*"012399"])
    assert found.pair(other, "score") == []


def test_a_source_whose_metric_is_of_the_corpus_has_no_interval(monkeypatch):
    monkeypatch.setattr(Distance, "primary_metric", "total")
    monkeypatch.setattr(Distance, "corpus_metrics", lambda *_: {"total": 0.5})
    found = evaluate(MIXED, [COUNTS[0], ERRORS[0]], ["0", "0"])
    assert found.metrics["e/total"] == 0.5
    assert math.isnan(found.interval[0])


def test_an_evaluation_of_samples_has_means_and_intervals_over_the_examples():
    examples = [Example(str(n), (), "How many?", n) for n in range(4)]
    texts = ["0", "0", "1", "7", "2", "8", "9", "9"]  # right: 2, 1, 1 and 0 of 2
    found = evaluate(COUNTING, examples, texts)
    assert (found.n, found.value, found.metrics["mean_at_2"]) == (4, 0.5, 0.5)
    assert (found.metrics["pass_at_2"], found.metrics["majority_at_2"]) == (0.75, 0.75)
    assert found.intervals["mean_at_2"] == found.interval
    # Four examples have 1, .5, .5 and 0: an interval of 8 outputs would be narrower than this one.
    means = [np.mean(c) for c in itertools.product([1, 0.5, 0.5, 0], repeat=4)]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert found.interval == pytest.approx(expected, abs=0.05)
    row = found.rows[1]
    assert (row["output"], row["rewards"]["exact"]) == ("1", 0.5)
    samples = [(s["output"], s["rewards"]["exact"]) for s in row.get("samples", [])]
    assert samples == [("1", 1.0), ("7", 0.0)]
    # The sources of a mixture have their own.
    examples = [Example(f"{source}/1", (), "How many?", 3, source=source) for source in ("c", "e")]
    found = evaluate(MIXED, examples, ["3", "4", "3.25", "2.5"])
    assert found.metrics["c/pass_at_2"] == 1.0
    assert found.metrics["e/pass_at_2"] == 0.25  # the lowest error
    assert found.metrics["e/majority_at_2"] == 0.25  # 3.25 is written as 3, 2.5 as 2: a tie
    assert found.metrics["pass_at_2"] == (1.0 + 1 - 0.25) / 2
