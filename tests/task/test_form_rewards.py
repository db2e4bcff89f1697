"""Thinking in each family's own tags, and the penalty ``overlong``."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import make_embedded_trainer

from vlm_grpo.model.families.known import load_family
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import ThinkingTags

EXAMPLE = Example("1", (), "How many?", 3)


@pytest.mark.parametrize("cache", [1, 20, 100])
def test_the_penalty_is_that_of_dapo_also_without_an_answer_but_not_without_a_length(cache):
    """TRL's get_soft_overlong_punishment gives the same values."""
    task = load_task("counting", weights={"overlong": 1}, overlong_cache=cache, token_limit=100)
    for tokens in (1, 79, 80, 81, 90, 99, 100, 101, 500):
        expected = 0.0 if tokens <= 100 - cache else -1.0  # equation 13
        if 100 - cache < tokens <= 100:
            expected = (100 - cache - tokens) / cache
        assert task.score("3", EXAMPLE, tokens).rewards["overlong"] == pytest.approx(expected)
        silent = task.score("many", EXAMPLE, tokens)
        assert silent.answer is None
        assert silent.total == silent.rewards["overlong"] == pytest.approx(expected)
    alone = task.score("3", EXAMPLE)
    assert (alone.rewards["exact"], alone.total) == (1.0, 1.0)
    assert "overlong" not in alone.rewards


def test_the_penalty_reaches_the_reward_of_a_run(tmp_path):
    """The embedded model generates 2 of 4 tokens; with a cache of 3, one of them is penalized."""
    options = ["task_options.weights.overlong=1", "task_options.overlong_cache=3"]
    metrics = make_embedded_trainer(tmp_path, *options).step()
    assert metrics["completions/mean_length"] == 2
    assert metrics["rewards/overlong/mean"] == pytest.approx(-1 / 3)
    assert metrics["reward"] == pytest.approx(metrics["rewards/exact/mean"] - 1 / 3, abs=1e-6)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v", "gemma4", "mistral3", "kimi_vl"])
def test_a_family_s_own_thinking_is_read_and_not_scored(family, is_open):
    opening, closing = tags = load_family(SimpleNamespace(model_type=family)).thinking_tags
    native = ThinkingTags(*tags, is_open=is_open, is_native=True)
    weights = {"format": 0.1, "thought": 0.1}
    start = "" if is_open else opening

    def read(text: str, **options: Any) -> tuple[int | None, float | None, float | None]:
        task = load_task("counting", thinking_tags=native, weights=weights, **options)
        score = task.score(text, EXAMPLE)
        return score.answer, score.rewards["format"], score.rewards["thought"]

    assert read(f"{start}\n4 or 5?{closing}\n3") == (3, 1.0, 1.0)
    assert read(f"{start}4{closing}<answer>3</answer>", tags=True) == (3, 1.0, 1.0)
    assert read(f"{opening}4{closing}3") == (3, 1.0, 1.0)  # also where the prompt has opened it
    assert read(f"{start}\n3") == (None, 0.0, 0.0)  # cut off
    assert read(f"{start}4{closing}5{closing}3") == (None, 0.0, 0.0)
    if not is_open:
        assert read("3") == (3, 0.0, 0.0)
    gold = load_task("counting", thinking_tags=native, weights=weights).gold(EXAMPLE)
    assert gold == f"{start}Look at the image.{closing}3"
    assert read(gold) == (3, 1.0, 1.0)


def test_a_thinking_that_is_requested_in_words_has_the_tags_of_the_request():
    tags = ThinkingTags("[THINK]", "[/THINK]")
    task = load_task("counting", thinking=True, thinking_tags=tags, weights={"format": 0.1})
    assert task.gold(EXAMPLE) == "<think>Look at the image.</think>3"
    for text in (task.gold(EXAMPLE), "[THINK]4[/THINK]3"):
        assert task.score(text, EXAMPLE).rewards["format"] == 1.0
