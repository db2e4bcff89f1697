"""Unit tests of pages: fields, texts, formulas, the pages that pass, and bounded time."""

import gc
import random
import time

import pytest

from vlm_grpo.tasks.graders.formulas import MAX_FORMULA
from vlm_grpo.tasks.graders.page_tests import Page, check_test, find_near, write_page

TESTS = [
    {"type": "present", "text": "Annual report"},
    {"type": "absent", "text": "page 3"},
    {"type": "order", "before": "First about rivers", "after": "Then about lakes", "max_diffs": 2},
    {"type": "math", "math": r"\frac{a}{b} = c"},
    {"type": "baseline"},
    {"type": "table", "cell": "4 < 5", "up": "2", "left": "3", "right": "6", "down": "7"},
    {"type": "table", "cell": "4", "top_heading": "Age", "left_heading": "Bob", "left": "x"},
]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test["type"])
def test_a_page_written_for_tests_passes_them(test):
    check_test(test)
    assert Page(write_page([test]) + "\n\nmore text").passes(test)
    assert all(map(Page(write_page(TESTS)).passes, TESTS))
    for alone in (TESTS[1], {"type": "baseline"}, {"type": "baseline", "max_length": 0}):
        assert Page(write_page([alone])).passes(alone)


def test_a_malformed_test_is_an_error():
    for test, reason in (
        (None, "must have a type"),
        ({"type": "format", "text": "a"}, "must have a type of present, absent"),
        ({"type": "present"}, "needs a non-empty text"),
        ({"type": "order", "before": "a", "after": " "}, "needs a non-empty after"),
        ({"type": "absent", "text": "a", "category": ["x"]}, "category of a test must be text"),
        ({"type": "table", "cell": "a", "up": 3}, "up of a test must be text"),
        ({"type": "absent", "text": "a", "max_diffs": -1}, "max_diffs of a test must be an int"),
        ({"type": "present", "text": "**ab**", "max_diffs": 2}, "at most 1 for text of 2 char"),
        ({"type": "absent", "text": "ab", "max_diffs": 3}, "type absent may be at most 1"),
        (
            TESTS[2] | {"before": "abcde", "max_diffs": 3},
            "order may be at most 2 for before of 5 ch",
        ),
        ({"type": "present", "text": "a", "first_n": True}, "first_n of a test"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_test(test)


def test_formulas_are_found_between_delimiters():
    page = Page(r"\(a\) $b$ $$c$$ \[d\] \( e")
    assert sorted(page.find_formulas(with_dollars=True)) == ["a", "b", "c", "d"]
    assert page.find_formulas(with_dollars=False) == ["a", "d"]


def test_hostile_pages_are_bounded():
    started = time.perf_counter()
    rng = random.Random(0)
    repeated = ["$", r"\(", "*_", "**", "| ", "a|\n", "<b>", "![", "First abou"]
    repeated += ["First about river ", "First about rivers "]
    hostile = [
        *(piece * (49_999 // len(piece)) for piece in repeated),
        "".join(f"${chr(rng.randrange(33, 127)) * 9}$" for _ in range(4_000)),
        "$" + "{" * (MAX_FORMULA + 1) + "$",
        "$" + r"\sqrt{" * 600 + "$",
    ]
    for text in hostile:
        page = Page(text)
        results = [page.passes(test) for test in TESTS]
        assert not all(results)
    assert time.perf_counter() - started < 120  # each page takes less than three seconds


def test_order_finds_the_near_matches_of_fuzzysearch_in_linear_time():
    fuzzysearch = pytest.importorskip("fuzzysearch")
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab ", k=rng.randint(5, 60)))
        query = "".join(rng.choices("ab", k=rng.randint(1, 8)))
        most = rng.randint(0, 3)
        expected = fuzzysearch.find_near_matches(query, text, max_l_dist=most)
        assert len(find_near(query, text, most)) == len(expected)

    def measure(count: int) -> float:
        started = time.process_time()
        assert Page("Hello" * count).passes(test)
        return time.process_time() - started

    test = {"type": "order", "before": "Hello", "after": "Jello", "max_diffs": 1}
    gc.disable()  # its passes over the objects of other tests are not the search's
    try:
        short, long = (min(measure(count) for _ in range(3)) for count in (2_000, 8_000))
    finally:
        gc.enable()
    assert long < 10 * short  # 16 would be quadratic
