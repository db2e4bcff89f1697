"""The summary of an evaluation of several sources."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vlm_grpo.data.loading import Mixed
from vlm_grpo.eval.scored import summarize
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example


class Far(Task):
    """A task whose primary metric is an error."""

    primary_metric = "error"

    def parse(self, text: str, example: Example) -> float:
        return float(text)

    @reward()
    def near(self, answer: float, example: Example) -> float:
        return 1.0 / (1.0 + abs(answer - example.answer))

    @metric()
    def error(self, answer: float, example: Example) -> float:
        return abs(answer - example.answer)


Far.lower_is_better = True
COUNTS = [Example(f"c/{n}", (), "How many?", n, source="c") for n in range(6)]
ERRORS = [Example(f"e/{n}", (), "How far?", n, source="e") for n in range(2)]


def evaluate(task: Task, examples: list[Example], texts: list[str]):
    with RewardScorer() as scorer:
        return summarize(task, examples, texts, scorer(task, texts, examples), 0)


def test_sources_count_equally_and_keep_their_own_metrics() -> None:
    mixed = Mixed(members={"c": load_task("counting"), "e": Far()})
    examples = [COUNTS[0], ERRORS[0], *COUNTS[1:], ERRORS[1]]
    texts = ["0", "0.25", "1", "2", "3", "9", "9", "1.5"]  # 4 of 6 counts; errors 0.25 and 0.5
    found = evaluate(mixed, examples, texts)
    counts = evaluate(load_task("counting"), COUNTS, ["0", "1", "2", "3", "9", "9"])
    assert found.primary_metric == "score"
    assert found.value == pytest.approx((4 / 6 + 1 - 0.375) / 2)
    assert {n: v for n, v in found.metrics.items() if n.startswith("c/")} == {
        f"c/{name}": value for name, value in counts.metrics.items() if name != "unscorable"
    }
    assert found.metrics["e/error"] == 0.375
    assert found.metrics["answered"] == 1.0
    low, high = found.interval
    assert low < found.value < high
    assert [row.get("source") for row in found.rows] == [example.source for example in examples]
    assert [row["id"] for row in found.rows] == [example.id for example in examples]


def test_the_interval_is_that_of_the_mean_of_the_sources() -> None:
    members = {"c": load_task("counting"), "d": load_task("counting")}
    few = [Example(f"d/{n}", (), "How many?", 1, source="d") for n in range(3)]
    many = [Example(f"c/{n}", (), "How many?", 1, source="c") for n in range(300)]
    texts = ["1"] * 3 + ["1", "2"] * 150
    found = evaluate(Mixed(members=members), [*few, *many], texts)
    assert found.value == 0.75
    assert np.mean(found.interval) == pytest.approx(0.75, abs=0.05)


def test_a_source_whose_metric_is_of_the_corpus_has_no_interval() -> None:
    members = {"c": load_task("counting"), "e": Far()}
    object.__setattr__(members["e"], "primary_metric", "total")
    object.__setattr__(members["e"], "corpus_metrics", lambda answers, examples: {"total": 0.5})
    mixed = Mixed(members={"c": members["c"]})
    object.__setattr__(mixed, "members", members)
    found = evaluate(mixed, [COUNTS[0], ERRORS[0]], ["0", "0"])
    assert found.metrics["e/total"] == 0.5
    assert math.isnan(found.interval[0])
