"""Tables: malformed and hostile texts, neighbors and headings of cells; TEDS against an independent
tree edit distance."""

import random
from functools import cache

import pytest
from rapidfuzz.distance import Levenshtein

from vlm_grpo.tasks.graders import tables
from vlm_grpo.tasks.graders.tables import Grid, Tree, read_grids, read_html_tree, teds

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
SPANS = (
    "<table><thead><tr><th colspan=2>H</th><th>I</th></tr></thead>"
    "<tr><td rowspan=2>a</td><td>b</td><td>c</td></tr><tr><td>d</td><td>e<br>f</td></tr></table>"
)


def get_texts(grid: Grid, places: set[tables.Place]) -> set[str]:
    return {grid.cells[place].text for place in places}


def test_neighbors_and_headings_of_cells_with_spans():
    (grid,) = read_grids(SPANS)
    neighbors = {
        **{((1, 0), RIGHT): "bd", ((1, 0), UP): "H", ((1, 0), DOWN): "", ((1, 0), LEFT): ""},
        **{((0, 0), DOWN): "ab", ((0, 0), RIGHT): "I", ((2, 1), LEFT): "a", ((2, 2), UP): "c"},
    }
    for (place, direction), texts in neighbors.items():
        assert get_texts(grid, grid.neighbors(place, *direction)) == {*texts}, (place, direction)
    # Headings are found over other cells.
    assert get_texts(grid, grid.find_headings((2, 2), *UP)) == {"I"}
    assert get_texts(grid, grid.find_headings((2, 2), *LEFT)) == {"a"}  # no heading: the last cell
    assert grid.find_headings((0, 0), *UP) == set()
    assert grid.cells[2, 2].text == "e\nf"
    # Rows 0 are all that follow.
    (grid,) = read_grids("<table><tr><td rowspan=0>a<td>b<tr><td>c<tr><td>d</table>")
    assert get_texts(grid, grid.neighbors((0, 0), *RIGHT)) == {"b", "c", "d"}


def test_markdown_tables_are_adjoining_lines_with_bars():
    text = "a|b\n---|---\n1|2\n\nText\n| x | |\n|:--|--:|\n|| y |\nend\n1|2"
    first, second = [["a", "b"], ["1", "2"]], [["x", ""], ["", "y"]]
    assert tables.read_markdown_rows(text) == [first, second, [["1", "2"]]]
    grids = read_grids(text)
    assert len(grids) == 2  # the last has one line
    assert get_texts(grids[1], grids[1].neighbors((1, 1), *UP)) == {""}
    assert get_texts(grids[0], grids[0].find_headings((1, 1), *UP)) == {"b"}


def test_malformed_html_is_repaired_and_a_text_without_a_table_has_no_tree():
    for text, cells in (
        ("<table><tr><td>a<td>b<tr><td>c</table>", [["a", "b"], ["c"]]),
        ("<TABLE><TR><TD>a&lt;b</TD></TR>", [["a<b"]]),
        ("<table><tr><td>\x00a\ud800<b>b</b> c</td></tr></table>", [["ab c"]]),
        ("<table><tr></tr><tr><td>é 北</td></tr></table>", [["é 北"]]),
    ):
        assert tables.read_html_rows(text) == cells
        assert read_html_tree(text) is not None
    texts = "", "<p>a</p>", "<table>" + "x" * tables.MAX_CHARACTERS
    assert [*map(read_html_tree, texts)] == [None] * 3


def test_hostile_tables_are_bounded():
    for text in (
        "<table><tr>" + "<td colspan=999999 rowspan=999999>a" * 1000,
        "<table><tr><td colspan=1000 rowspan=999999>a" + "<tr>" * 9000,
        "<table>" + "<tr><td>a" * 5000,
        "<table>" + "<tr><td><table>" * 900,
        "|" * 20_000 + "\n|",
        "a|b\n" * 9_000,
    ):
        for grid in read_grids(text):
            assert len(grid.cells) <= tables.MAX_PLACES
            grid.find_headings((0, 0), *DOWN)


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
    text = "<table>"
    for _ in range(rng.randint(0, 3)):
        text += rng.choice(["", "<thead>", "<tbody>"])
        for _ in range(rng.randint(0, 2)):
            text += "<tr>"
            for _ in range(rng.randint(0, 3)):
                text += rng.choice(["<td>", "<td>", "<td colspan=2>"])
                text += rng.choice(["", "a", "ab", "abc", "<b>a</b>"])
    return text


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
    assert teds(tables.drop_texts(padded), tables.drop_texts(gold)) == 1.0


def test_a_markdown_table_is_the_tree_of_rows_and_cells():
    html = "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td></tr></table>"
    assert tables.build_markdown_tree([["a", "b"], ["1"]]) == read(html)


def write_rows(rows: int, columns: int, text: str = "1") -> str:
    return "<table>" + ("<tr>" + f"<td>{text}" * columns + "</tr>") * rows + "</table>"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (write_rows(80, 10, "2"), True),
        ("<table>" + "<tr>" * 3000, True),
        ("<table>" + "<thead><tr><td>a</thead>" * 700, True),
        ("<table>" + "<b>" * 5000, True),
        ("<table>" + "<tr><td>1</td>" * 1400, True),
        # Every level is the right sibling of a leaf, which makes the work quadratic.
        ("<table>" + "<div><i></i>" * 1600, False),
    ],
)
def test_the_steps_of_teds_are_counted_and_bounded(text, fits, monkeypatch):
    """A table of 80 rows takes 10 million steps, and no text of 20,000 characters over 24."""
    gold, answer, done = read(write_rows(80, 10)), read(text[:20_000]), 0
    compare = tables._compare_forests  # noqa: SLF001

    def count(leftmost, root, others, costs, trees):
        nonlocal done
        done += (root - leftmost[root] + 1) * (1_000 + others.nodes.size)
        compare(leftmost, root, others, costs, trees)

    monkeypatch.setattr(tables, "_compare_forests", count)
    score = teds(answer, gold)
    steps = min(tables.count_steps(answer, gold), tables.count_steps(gold, answer))
    assert (steps <= tables.MAX_STEPS) == fits
    pairs = 4 * len(answer.kinds) * len(gold.kinds)
    assert done == (steps - pairs if fits else 0)
    assert 0 <= score < 0.6
