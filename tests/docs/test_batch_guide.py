"""The tasks of docs/batch-rewards.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from judge_server import Reply, run_judge

from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

PAGE = Path(__file__).parents[2] / "docs/batch-rewards.md"
ROW = Example("1", (), "What is it?", "dog")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the page's Python blocks define."""
    found: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M):
        exec(compile(block, str(PAGE), "exec"), found)
    return found


def test_variety_is_judged_within_a_group(names):
    texts = ["a dog sleeps", "a dog runs", "a dog runs"]
    scores = RewardScorer()(names["Caption"](), texts, [ROW] * 3, None, [0, 0, 1])
    # "sleeps" and "runs" are the only words of their group that no other completion has.
    assert [score.rewards["variety"] for score in scores] == [1 / 3, 1 / 3, 1.0]
    assert scores[0].total == pytest.approx(1.0 + 0.2 / 3)


def test_the_reward_of_a_group_has_ten_lines():
    method = PAGE.read_text("utf-8").partition("    @reward(weight=0.2")[2].partition("```")[0]
    assert len(method.splitlines()) <= 10


def test_a_service_is_asked_for_its_values(names):
    with run_judge(lambda body: Reply(body=b'{"toxicity": 0.25}')) as server:
        (score,) = RewardScorer()(names["Toxicity"](address=server.address), ["hi"], [ROW])
    assert score.total == 0.75
    assert [body for _, _, body in server.requests] == [{"text": "hi"}]


def test_the_judge_joins_another_task(names):
    task = load_task(names["JudgedCounting"], address="http://localhost:1/v1", judge_model="j")
    assert task.reward_weights() == {"judge": 1.0, "exact": 1.0, "closeness": 0.0}


def test_the_table_lists_the_options_of_the_judge(names):
    text = PAGE.read_text("utf-8").partition("## A judge")[2]
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(listed) == set(vars(names["Judged"])["__annotations__"])
