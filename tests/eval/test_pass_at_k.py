"""Metrics of several samples: compared with an enumeration of all subsets in float64."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
from chat_model import ChatModel, serve

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.loading import Mixed
from vlm_grpo.eval.evaluate import evaluate
from vlm_grpo.eval.scored import estimate_best, find_majority, merge_scores, summarize
from vlm_grpo.serve.chat import Endpoint
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

COUNTING = load_task("counting")
EXAMPLE = Example("1", (), "How many?", 3)


class Distance(Task):
    """A task whose primary metric is an error, undefined without an answer."""

    primary_metric = "error"
    lower_is_better = True

    def parse(self, text: str, example: Example) -> float | None:
        return float(text) if text else None

    def write(self, answer: float, example: Example) -> str:
        if answer == 13:
            raise RuntimeError("a user's method")
        return f"{answer:.0f}"

    @reward()
    def near(self, answer: float, example: Example) -> float:
        return 1.0 / (1.0 + abs(answer - example.answer))

    @metric(without_answer=None)
    def error(self, answer: float, example: Example) -> float:
        return abs(answer - example.answer)


def score(task: Task, texts: list[str], example: Example = EXAMPLE):
    return [task.score(text, example) for text in texts]


@pytest.mark.parametrize("lower_is_better", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_best_of_k_is_the_mean_over_all_subsets(n: int, lower_is_better: bool) -> None:
    values = [random.Random(n).choice([0.0, 1.0, 0.25, 0.7]) for _ in range(n)]
    best = min if lower_is_better else max
    for size in range(1, n + 1):
        subsets = [best(subset) for subset in itertools.combinations(values, size)]
        expected = float(sum(map(Fraction, subsets)) / len(subsets))
        assert estimate_best(values, size, lower_is_better) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("correct", range(7))
def test_of_right_and_wrong_samples_it_is_the_published_estimator(correct: int) -> None:
    values = [1.0] * correct + [0.0] * (6 - correct)
    for size in range(1, 7):
        expected = 1 - comb(6 - correct, size) / comb(6, size)
        assert estimate_best(values, size) == pytest.approx(expected, abs=1e-12)


def test_a_large_number_of_samples_neither_overflows_nor_loses_precision() -> None:
    values = [1.0] + [0.0] * 4095
    assert estimate_best(values, 1024) == pytest.approx(1024 / 4096, abs=1e-12)


@pytest.mark.parametrize(
    ("texts", "position"),
    [
        (["2", "3", "3"], 1),
        (["2", "3"], 0),  # a tie: the first answer
        (["3", "2", "2", "3"], 0),
        (["", "", "3"], 2),  # no answer, no vote
        (["", ""], 0),
        (["13", "13", "2"], 2),  # an answer that cannot be written has no vote
        (["2.2", "1.8", "3"], 0),  # equal as the task writes them
    ],
)
def test_the_majority_is_of_answers_as_the_task_writes_them(
    texts: list[str], position: int
) -> None:
    assert find_majority(Distance(), EXAMPLE, score(Distance(), texts)) == position


def test_the_metrics_of_an_example_are_those_of_its_samples() -> None:
    found = merge_scores(COUNTING, EXAMPLE, score(COUNTING, ["3", "4", "4", "3", "none"]))
    assert found.answer == 3
    assert found.rewards["exact"] == found.metrics["mean_at_5"] == 2 / 5
    assert found.metrics["pass_at_2"] == pytest.approx(1 - 3 / 10)  # of 10 pairs, 3 are all wrong
    assert found.metrics["pass_at_5"] == 1.0
    assert found.metrics["majority_at_5"] == 1.0  # 3 and 4 are as frequent, and 3 is first
    (alone,) = score(COUNTING, ["3"])
    assert merge_scores(COUNTING, EXAMPLE, [alone]) is alone


def test_without_a_value_for_each_sample_only_the_mean_of_the_others_is_known() -> None:
    found = merge_scores(Distance(), EXAMPLE, score(Distance(), ["4", ""]))
    assert found.metrics["error"] == 1.0
    assert found.metrics["pass_at_2"] is None
    assert found.metrics["majority_at_2"] is None


def test_an_evaluation_has_means_and_intervals_over_the_examples() -> None:
    examples = [Example(str(n), (), "How many?", n) for n in range(4)]
    texts = ["0", "0", "1", "7", "2", "8", "9", "9"]  # right: 2, 1, 1 and 0 of 2
    scores = [COUNTING.score(t, examples[i // 2]) for i, t in enumerate(texts)]
    found = summarize(COUNTING, examples, texts, scores, 0)
    assert (found.n, found.value, found.metrics["mean_at_2"]) == (4, 0.5, 0.5)
    assert (found.metrics["pass_at_2"], found.metrics["majority_at_2"]) == (0.75, 0.75)
    assert found.intervals["mean_at_2"] == found.interval
    # Four examples have 1, .5, .5 and 0: an interval of 8 outputs would be narrower than this one.
    means = [np.mean(c) for c in itertools.product([1, 0.5, 0.5, 0], repeat=4)]
    expected = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    assert found.interval == pytest.approx(expected, abs=0.05)
    row = found.rows[1]
    assert (row["output"], row["rewards"]["exact"]) == ("1", 0.5)
    assert [s["output"] for s in row.get("samples", [])] == ["1", "7"]
    assert [s["rewards"]["exact"] for s in row.get("samples", [])] == [1.0, 0.0]


def test_the_sources_of_a_mixture_have_their_own_metrics_of_samples() -> None:
    task = Mixed(members={"c": COUNTING, "d": Distance()})
    examples = [Example(f"{source}/1", (), "How many?", 3, source=source) for source in ("c", "d")]
    texts = ["3", "4", "3.25", "2.5"]
    scores = []
    for number, text in enumerate(texts):
        example = examples[number // 2]
        source, own = task.resolve(example)
        scores.append(own.score(text, example).with_prefix(source))
    found = summarize(task, examples, texts, scores, 0)
    assert found.metrics["c/pass_at_2"] == 1.0
    assert found.metrics["d/pass_at_2"] == 0.25  # the lowest error
    assert found.metrics["d/majority_at_2"] == 0.25  # 3.25 is written as 3, 2.5 as 2: a tie
    assert found.metrics["pass_at_2"] == (1.0 + 1 - 0.25) / 2


def test_each_sample_is_asked_for_with_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    given = ["model=none", f"output_dir={tmp_path}", "data.eval_limit=3"]
    given += ["evaluation.temperature=1", "data.train_limit=1"]
    turns = itertools.count()
    once, several = ChatModel(), ChatModel(answer=lambda text, image: str(next(turns)))
    with serve(once) as server:
        endpoint = Endpoint(server.address, concurrency=1)
        evaluate(load_settings("counting", given), None, endpoint)
    settings = load_settings("counting", [*given, "name=several", "evaluation.samples=2"])
    with serve(several) as server:
        found = evaluate(settings, None, Endpoint(server.address, concurrency=1))
        assert evaluate(settings, None, server.address).rows == found.rows  # nothing is asked
    seeds = [body["seed"] for body in several.bodies]
    assert seeds[::2] == [body["seed"] for body in once.bodies]
    assert len({*seeds}) == 6
    assert [sample["output"] for row in found.rows for sample in row.get("samples", [])] == [
        *"012345"
    ]
