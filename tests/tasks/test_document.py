"""The task document: gold answers of tests and texts, and metrics over examples."""

import pytest

from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

TEXT = "The first block.\n\nAnother, the second one.\n\nSome third block."
PRESENT = {"type": "present", "text": "The first block"}


def build(answer: object) -> Example:
    return Example("1", (), "Read the page.", answer)


def test_a_text_alone_is_a_gold_answer():
    task = load_task("document", weights={"passed": 0, "similarity": 0.5, "order": 0.5})
    example = build({"text": TEXT})
    task.check(example)
    assert task.score(task.gold(example), example).total == 1.0
    half = load_task("document").score(TEXT[: len(TEXT) // 2], example).total
    assert half == pytest.approx(0.5, abs=0.02)
    assert task.score("x" * 50_001, example).answer is None


def test_metrics_are_means_over_the_examples_that_have_them():
    task = load_task("document")
    tests = [PRESENT | {"category": "a"}, {"type": "absent", "text": "X", "category": "b"}]
    examples = [build({"tests": tests}), build({"text": TEXT}), build({"tests": tests[:1]})]
    values = task.corpus_metrics(["The first block", TEXT, None], examples)
    # Category a passes in one of two examples, b in its only one; the text is reproduced.
    assert values == {"category_mean": 0.75, "edit_distance": 0.0, "order_distance": 0.0}
    assert task.corpus_metrics([None], examples[1:2])["order_distance"] == 1.0
    assert "edit_distance" not in task.corpus_metrics([None], examples[:1])
