"""Thinking in each family's own tags."""

# Apart from test_task.py, whose module the workers of a scorer import: families take seconds.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlm_grpo.model.families import load_family
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import ThinkingTags

EXAMPLE = Example("1", (), "How many?", 3)

FAMILIES_TAGS = {
    family: load_family(SimpleNamespace(model_type=family)).thinking_tags
    for family in ("qwen3_vl", "glm4v", "gemma4", "mistral3", "kimi_vl")
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("tags", FAMILIES_TAGS.values(), ids=FAMILIES_TAGS)
def test_a_family_s_own_thinking_is_read_and_not_scored(tags: tuple[str, str], is_open: bool):
    opening, closing = tags
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
