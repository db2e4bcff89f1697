"""TEDS: against an independent tree edit distance, its bounds, and hostile trees."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest
from rapidfuzz.distance import Levenshtein

from vlm_grpo.task.graders.tables import build_markdown_tree, read_html_tree
from vlm_grpo.task.graders.teds import MAX_WORK, Tree, drop_texts, teds

Nested = tuple[tuple[str, int, int], str, tuple["Nested", ...]]


def nest(tree: Tree) -> Nested:
    """Return a tree as nested tuples, each node with its children."""
    waiting: list[tuple[int, Nested]] = []
    for node, kind in enumerate(tree.kinds):
        children = []
        while waiting and waiting[-1][0] >= tree.leftmost[node]:
            children.append(waiting.pop()[1])
        waiting.append((tree.leftmost[node], (kind, tree.texts[node], tuple(children[::-1]))))
    ((_, root),) = waiting
    return root


@cache
def forest_distance(first: tuple[Nested, ...], second: tuple[Nested, ...]) -> float:
    """Compute the edit distance of forests by its recursion over the rightmost roots."""
    if not first and not second:
        return 0.0
    choices = []
    if first:
        choices.append(forest_distance((*first[:-1], *first[-1][2]), second) + 1.0)
    if second:
        choices.append(forest_distance(first, (*second[:-1], *second[-1][2])) + 1.0)
    if first and second:
        (kind, text, children), (other_kind, other_text, others) = first[-1], second[-1]
        cost = Levenshtein.normalized_distance(text, other_text) if kind == other_kind else 1.0
        rest = forest_distance(first[:-1], second[:-1])
        choices.append(rest + forest_distance(children, others) + cost)
    return min(choices)


def draw_table(rng: random.Random) -> str:
    def draw_row() -> str:
        texts = rng.choices(["", "a", "ab", "abc", "<b>a</b>"], k=rng.randint(0, 3))
        cells = (f"<td{rng.choice(['', '', ' colspan=2'])}>{text}" for text in texts)
        return f"<tr>{''.join(cells)}</tr>"

    parts = []
    for _ in range(rng.randint(0, 3)):
        rows = "".join(draw_row() for _ in range(rng.randint(0, 2)))
        section = rng.choice(["", "thead", "tbody"])
        parts.append(f"<{section}>{rows}</{section}>" if section else rows)
    return f"<table>{''.join(parts)}</table>"


def read(text: str) -> Tree:
    tree = read_html_tree(text)
    assert tree is not None
    return tree


def test_teds_is_that_of_the_recursive_distance():
    rng = random.Random(0)
    for _ in range(300):
        answer, gold = read(draw_table(rng)), read(draw_table(rng))
        most = max(len(tree.kinds) + tree.inline for tree in (answer, gold)) - 1
        distance = forest_distance((nest(answer),), (nest(gold),))
        expected = 1.0 if answer == gold else max(0.0, 1.0 - distance / most)
        assert teds(answer, gold, most_inline=10**6) == pytest.approx(expected)


def test_tags_within_cells_beyond_the_gold_tables_do_not_raise_the_score():
    gold = read("<table><tr><td>a</td><td>b</td></tr></table>")
    wrong = read("<table><tr><td>x</td><td>y</td></tr></table>")
    padded = read("<table><tr><td>x</td><td>" + "<b></b>" * 97 + "</td></tr></table>")
    assert teds(wrong, gold) == teds(padded, gold) == pytest.approx(1 / 3)
    assert teds(padded, gold, most_inline=1000) == pytest.approx(0.98)  # as the script: 1 − 2 / 100
    assert teds(drop_texts(padded), drop_texts(gold)) == 1.0


def test_a_markdown_table_is_the_tree_of_rows_and_cells():
    html = "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td></tr></table>"
    assert build_markdown_tree([["a", "b"], ["1"]]) == read(html)


def test_a_hostile_tree_earns_nothing_at_once():
    gold = read("<table>" + "<tr><td>1<td>2<td>3</tr>" * 100 + "</table>")
    # Every level is the right sibling of a cell, which makes the distance's work quadratic.
    hostile = read("<table>" + "<tr><td>1</td>" * 240)
    deep = read("<table>" + "<div><i></i>" * 240)
    assert gold.work * deep.work > MAX_WORK
    started = time.perf_counter()
    assert teds(deep, gold) == 0.0
    assert teds(hostile, gold) < 0.9
    assert time.perf_counter() - started < 60  # a hang would take minutes
