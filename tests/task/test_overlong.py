"""The reward overlong: the paper's and TRL's penalty, and the settings that would defeat it."""

# Apart from test_task.py, whose module the workers of a scorer import: TRL takes ten seconds.

from __future__ import annotations

from typing import Any

import pytest
from small_runs import make_embedded_trainer
from trl.rewards.other_rewards import get_soft_overlong_punishment

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

EXAMPLE = Example("1", (), "How many?", 3)

OVERLONG: dict[str, Any] = {"weights": {"overlong": 1.0}, "overlong_cache": 20}


def compute_penalty(tokens: int | None, **options: Any) -> float | None:
    task = load_task("counting", **{**OVERLONG, "token_limit": 100, **options})
    return task.score("3", EXAMPLE, tokens).rewards.get("overlong")


def compute_paper_penalty(length: int, limit: int, cache: int) -> float:
    """Compute equation 13 of DAPO (arXiv:2503.14476)."""
    if length <= limit - cache:
        return 0.0
    return ((limit - cache) - length) / cache if length <= limit else -1.0


@pytest.mark.parametrize("tokens", [1, 79, 80, 81, 90, 99, 100, 101, 500])
@pytest.mark.parametrize("cache", [1, 20, 100])
def test_the_penalty_equals_the_papers_and_trls(tokens: int, cache: int) -> None:
    found = compute_penalty(tokens, overlong_cache=cache)
    assert found == pytest.approx(compute_paper_penalty(tokens, 100, cache), abs=1e-12)
    (trl,) = get_soft_overlong_punishment(100, cache)(completion_ids=[[0] * tokens])
    assert found == pytest.approx(trl, abs=1e-12)


def test_a_completion_without_an_answer_is_penalized_and_one_without_a_length_not() -> None:
    task = load_task("counting", **OVERLONG, token_limit=100)
    score = task.score("many", EXAMPLE, 90)
    assert score.answer is None
    assert score.total == score.rewards["overlong"] == -0.5
    alone = task.score("3", EXAMPLE)
    assert (alone.rewards["exact"], alone.total) == (1.0, 1.0)
    assert "overlong" not in alone.rewards


def test_the_penalty_reaches_the_reward_of_a_run(tmp_path: Any) -> None:
    """The embedded model generates 2 of 4 tokens; with a cache of 3, one of them is penalized."""
    options = ["task_options.weights.overlong=1", "task_options.overlong_cache=3"]
    metrics = make_embedded_trainer(tmp_path, *options).step()
    assert metrics["completions/mean_length"] == 2
    assert metrics["rewards/overlong/mean"] == pytest.approx(-1 / 3)
    assert metrics["reward"] == pytest.approx(metrics["rewards/exact/mean"] - 1 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task_options.overlong_cache=9", "overlong_cache=9 exceeds .*max_completion_length=4"),
        ("objective.mask_truncated_completions=true", "leaves out of the loss: use one of the two"),
    ],
)
def test_settings_that_defeat_the_penalty_are_refused(change: str, message: str) -> None:
    overlong = ["task_options.weights.overlong=1", "task_options.overlong_cache=2"]
    load_settings("quickstart", overlong)
    with pytest.raises(UserError, match=message):
        load_settings("quickstart", [*overlong, change])
    with pytest.raises(UserError, match="needs overlong_cache"):
        load_task("counting", weights={"overlong": 1.0})
