"""Tests of the task gui: rewards against their definitions, several screens, actions."""

import math
import random
from typing import Any

import numpy as np
import pytest

from vlm_grpo.task import registry
from vlm_grpo.types import Example, ImageRef

OLD = ImageRef("old", size=(100, 100), resized_size=(100, 100))
SCREEN = ImageRef("screen", size=(640, 480), resized_size=(644, 476))
load_task: Any = registry.load_task


def make_example(answer: dict, *images: ImageRef) -> Example:
    return Example("1", images or (SCREEN,), "close the window", answer)


def draw_box(rng: random.Random) -> list[int]:
    x, y = rng.randrange(600), rng.randrange(440)
    return [x, y, x + rng.randint(1, 60), y + rng.randint(1, 60)]


def reward_by_matrices(found: list[int], gold: list[int], spread: float) -> tuple[float, float]:
    """Return the point and the coverage reward of GUI-G², with means and covariance matrices."""
    starts, ends = np.reshape((found, gold), (2, 2, 2)).swapaxes(0, 1)  # of both boxes
    cov, gold_cov = map(np.diag, (spread * (ends - starts)) ** 2)
    shift = np.subtract(*(starts + ends) / 2)
    point = math.exp(-0.5 * shift @ np.linalg.inv(gold_cov) @ shift)
    average = (cov + gold_cov) / 2
    det = np.linalg.det
    distance = shift @ np.linalg.inv(average) @ shift / 8
    distance += 0.5 * math.log(det(average) / math.sqrt(det(cov) * det(gold_cov)))
    return point, math.exp(-distance)


def test_the_gaussian_rewards_are_those_of_the_paper():
    rng = random.Random(0)
    for _ in range(100):
        spread, gold, found = rng.choice((0.3, 0.5, 1.0)), draw_box(rng), draw_box(rng)
        task = load_task("gui", box=True, spread=spread, weights={"gaussian": 1, "coverage": 1})
        rewards = task.score(f"{found}", make_example({"boxes": [gold]})).rewards
        point, coverage = reward_by_matrices(found, gold, spread)
        # 1e-9: the same formulas in another order of operations.
        assert rewards["gaussian"] == pytest.approx(point, abs=1e-9)
        assert rewards["coverage"] == pytest.approx(coverage, abs=1e-9)


def test_the_action_is_on_the_last_of_several_screens():
    task = load_task("gui")
    example = make_example({"boxes": [[600, 400, 620, 420]]}, OLD, SCREEN)
    assert "640x480" in task.prompt(example)
    assert task.score(task.gold(example), example).total == 1
    assert task.target_image(example) is SCREEN


def test_the_prompt_lists_the_actions_in_the_order_of_the_frame():
    example = make_example({"action": "scroll", "direction": "up"})
    task = load_task("gui", actions=["scroll", "type"])
    task.check(example)
    for part in ('"click", "coordinate": [x, y]', '"up|down|left|right"', '"text": "…"'):
        assert part in task.prompt(example)
    assert task.score(task.gold(example), example).total == 1
