"""The mean, the best and the majority of several samples of an example."""

import itertools
import random
from fractions import Fraction

import pytest
from small_tasks import Distance

from vlm_grpo import Example, Task, load_task
from vlm_grpo.eval.pass_at_k import estimate_best, find_majority, merge_scores

COUNTING = load_task("counting")
EXAMPLE = Example("1", (), "How many?", 3)


def score(task: Task, texts: list[str]):
    return [task.score(text, EXAMPLE) for text in texts]


def test_the_best_of_k_is_the_mean_over_all_subsets():
    for n, lower_is_better in itertools.product((1, 2, 5, 8), (False, True)):
        values = [random.Random(n).choice([0.0, 1.0, 0.25, 0.7]) for _ in range(n)]
        best = min if lower_is_better else max
        for size in range(1, n + 1):
            subsets = [best(subset) for subset in itertools.combinations(values, size)]
            expected = float(sum(map(Fraction, subsets)) / len(subsets))
            found = estimate_best(values, size, lower_is_better)
            assert found == pytest.approx(expected, abs=1e-12)
    # Neither an overflow nor a loss of precision.
    assert estimate_best([1.0] + [0.0] * 4095, 1024) == pytest.approx(1024 / 4096, abs=1e-12)


def test_the_majority_is_of_answers_as_the_task_writes_them():
    for texts, position in (
        (["2", "3", "3"], 1),
        (["2", "3"], 0),  # a tie: the first answer
        (["3", "2", "2", "3"], 0),
        (["", "", "3"], 2),  # no answer, no vote
        (["", ""], 0),
        (["13", "13", "2"], 2),  # an answer that cannot be written has no vote
        (["2.2", "1.8", "3"], 0),  # equal as the task writes them
    ):
        assert find_majority(Distance(), EXAMPLE, score(Distance(), texts)) == position


def test_the_metrics_of_an_example_are_those_of_its_samples():
    found = merge_scores(COUNTING, EXAMPLE, score(COUNTING, ["3", "4", "4", "3", "none"]))
    assert found.answer == 3
    assert found.rewards["exact"] == found.metrics["mean_at_5"] == 2 / 5
    assert found.metrics["pass_at_2"] == pytest.approx(1 - 3 / 10)  # of 10 pairs, 3 are all wrong
    assert found.metrics["pass_at_5"] == 1.0
    assert found.metrics["majority_at_5"] == 1.0  # 3 and 4 are as frequent, and 3 is first
    found = merge_scores(COUNTING, EXAMPLE, score(COUNTING, ["4", "3", "3"]))
    assert found.metrics["majority_at_3"] == 1.0  # not that of the first
    (alone,) = score(COUNTING, ["3"])
    assert merge_scores(COUNTING, EXAMPLE, [alone]) is alone
    # Without a value for each sample, only the mean of the others is known.
    found = merge_scores(Distance(), EXAMPLE, score(Distance(), ["4", ""]))
    names = ("error", "pass_at_2", "majority_at_2")
    assert [found.metrics[name] for name in names] == [1.0, None, None]
