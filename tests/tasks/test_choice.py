"""Tests of the task choice: the order of the options, and metrics of position."""

from collections import Counter
from typing import Any

import pytest

from vlm_grpo.task import registry
from vlm_grpo.types import Example

OPTIONS = ["red", "green", "blue", "a cat"]
KEPT = [
    *(["Point A", "Point B"], ["A", "B", "C"], ["one", "two", "none of the above"]),
    *(["cat", "dog", "Both A and B"], ["the second image", "all of them"]),
]
SHUFFLED = [["A cat", "a dog"], ["left", "right"], ["image 1", "image 2"]]
load_task: Any = registry.load_task


def make_example(name: str, options: list[str] | None = None) -> Example:
    options = options or OPTIONS
    return Example(name, (), "Which one?", {"options": options, "answer": options[0]})


def test_the_order_depends_on_the_id_only_and_favors_no_position():
    task = load_task("choice")
    examples = [make_example(f"e{number}") for number in range(1200)]
    letters = Counter(task.gold(example) for example in examples)
    # 300 of each expected, with a standard deviation of √(1200·¼·¾) = 15.
    assert all(abs(letters[letter] - 300) < 60 for letter in "ABCD")
    assert task.order(examples[7]) == load_task("choice", tags=True).order(make_example("e7"))
    assert len({tuple(task.order(example)) for example in examples}) == 24  # all orders occur


@pytest.mark.parametrize("options", [*KEPT, *SHUFFLED], ids=", ".join)
def test_options_are_shuffled_unless_they_refer_to_letters_or_others(options):
    task = load_task("choice")
    orders = {tuple(task.order(make_example(f"e{number}", options))) for number in range(20)}
    assert (orders == {tuple(range(len(options)))}) == (options in KEPT)


def test_the_prompt_shows_the_options_in_that_order():
    task, example = load_task("choice"), make_example("e1")
    first, *shown, last = task.prompt(example).splitlines()
    order = [OPTIONS[number] for number in task.order(example)]
    assert shown == [f"{letter}. {text}" for letter, text in zip("ABCD", order, strict=True)]
    assert (first, last) == ("Which one?", "Answer with the letter of the right option alone.")


def test_corpus_metrics_show_a_bias_of_position():
    task = load_task("choice", shuffle=False)
    examples = [make_example("a"), make_example("b"), make_example("c", ["x", "y"])]
    examples[2].answer["answer"] = "y"
    expected = {"majority_baseline": 2 / 3, "exact_of_A": 0.5, "exact_of_B": 0.0}
    assert task.corpus_metrics([0, None, 0], examples) == pytest.approx(expected)
    assert task.corpus_metrics([], []) == {}
    assert [task.score("A", example).metrics["first"] for example in examples] == [1, 1, 1]
    task = load_task("choice")  # the letter that is shown
    example = next(e for e in map(make_example, "abcdef") if task.gold(e) == "C")
    assert task.corpus_metrics([0], [example]) == {"majority_baseline": 1.0, "exact_of_C": 1.0}
