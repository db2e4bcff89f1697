"""Weights of rewards that change with the training."""

from __future__ import annotations

import math

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task import Task, reward
from vlm_grpo.task.registry import check_trainable, load_task
from vlm_grpo.types import Example

EXAMPLE = Example("1", (), "1 + 2?", 3)


class Sum(Task):
    """A task with two rewards."""

    primary_metric = "exact"

    def parse(self, text: str, example: Example) -> int:
        return int(text)

    def write(self, answer: int, example: Example) -> str:
        return str(answer)

    @reward()
    def exact(self, answer: int, example: Example) -> float:
        return float(answer == example.answer)

    @reward()
    def near(self, answer: int, example: Example) -> float:
        return 1.0 / (1.0 + abs(answer - example.answer))


def test_a_weight_may_change_with_the_progress() -> None:
    task = load_task(Sum, weights={"exact": [[0.0, 1.0], [0.5, 1.0], [1.0, 0.2]], "near": 2})
    weights = [task.at(progress).reward_weights() for progress in (0.0, 0.5, 0.75, 1.0)]
    assert [weight["exact"] for weight in weights] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    assert {weight["near"] for weight in weights} == {2}
    score = task.at(1.0).score("3", EXAMPLE)
    assert score.total == pytest.approx(2.2)


def test_a_reward_may_begin_without_a_weight() -> None:
    off = dict.fromkeys(Sum.rules("reward"), 0)
    assert check_trainable(load_task(Sum, weights={**off, "exact": [[0.0, 0.0], [1.0, 1.0]]}))
    for weight in (0, [[0.0, 0.0], [1.0, 0.0]]):
        with pytest.raises(UserError, match="no reward has a weight"):
            check_trainable(load_task(Sum, weights={**off, "exact": weight}))


@pytest.mark.parametrize(
    "weight",
    [
        [],
        [[0.5, 1.0], [0.5, 2.0]],
        [[1.0, 1.0], [0.0, 2.0]],
        [[-0.1, 1.0]],
        [[0.5]],
        [[0.0, 1.0], [1.1, 1.0]],
    ],
)
def test_a_wrong_schedule_is_refused(weight: list) -> None:
    with pytest.raises(UserError, match="in ascending order"):
        load_task(Sum, weights={"exact": weight})
    with pytest.raises(UserError, match="must be a finite number"):
        load_task(Sum, weights={"exact": [[0.0, math.inf]]})
