"""Reading tables: malformed and hostile texts, spans, neighbors and headings of cells."""

from __future__ import annotations

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task.graders import tables
from vlm_grpo.task.graders.tables import (
    MAX_CHARACTERS,
    MAX_PLACES,
    Grid,
    Place,
    import_extra,
    read_grids,
    read_html_rows,
    read_html_tree,
    read_markdown_rows,
)

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
SPANS = (
    "<table><thead><tr><th colspan=2>H</th><th>I</th></tr></thead>"
    "<tr><td rowspan=2>a</td><td>b</td><td>c</td></tr><tr><td>d</td><td>e<br>f</td></tr></table>"
)


def get_texts(grid: Grid, places: set[Place]) -> set[str]:
    return {grid.cells[place].text for place in places}


@pytest.mark.parametrize(
    ("place", "direction", "texts"),
    [
        ((1, 0), RIGHT, {"b", "d"}),
        ((1, 0), UP, {"H"}),
        ((1, 0), DOWN, set()),
        ((1, 0), LEFT, set()),
        ((0, 0), DOWN, {"a", "b"}),
        ((0, 0), RIGHT, {"I"}),
        ((2, 1), LEFT, {"a"}),
        ((2, 2), UP, {"c"}),
    ],
)
def test_neighbors_of_cells_with_spans(place, direction, texts):
    (grid,) = read_grids(SPANS)
    assert get_texts(grid, grid.neighbors(place, *direction)) == texts


def test_headings_are_found_over_other_cells():
    (grid,) = read_grids(SPANS)
    assert get_texts(grid, grid.find_headings((2, 2), *UP)) == {"I"}
    assert get_texts(grid, grid.find_headings((2, 2), *LEFT)) == {"a"}  # no heading: the last cell
    assert grid.find_headings((0, 0), *UP) == set()
    assert grid.cells[2, 2].text == "e\nf"


def test_markdown_tables_are_adjoining_lines_with_bars():
    text = "a|b\n---|---\n1|2\n\nText\n| x | |\n|:--|--:|\n|| y |\nend\n1|2"
    first, second, third = read_markdown_rows(text)
    assert (first, second, third) == (
        [["a", "b"], ["1", "2"]],
        [["x", ""], ["", "y"]],
        [["1", "2"]],
    )
    grids = read_grids(text)
    assert len(grids) == 2  # the last has one line
    assert get_texts(grids[1], grids[1].neighbors((1, 1), *UP)) == {""}
    assert get_texts(grids[0], grids[0].find_headings((1, 1), *UP)) == {"b"}


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("<table><tr><td>a<td>b<tr><td>c</table>", [["a", "b"], ["c"]]),
        ("<TABLE><TR><TD>a&lt;b</TD></TR>", [["a<b"]]),
        ("<table><tr><td>\x00a\ud800<b>b</b> c</td></tr></table>", [["ab c"]]),
        ("<table><tr></tr><tr><td>é 北</td></tr></table>", [["é 北"]]),
    ],
)
def test_malformed_html_is_repaired(text, cells):
    assert read_html_rows(text) == cells
    assert read_html_tree(text) is not None


@pytest.mark.parametrize("text", ["", "<p>a</p>", "<table>" + "x" * MAX_CHARACTERS])
def test_a_text_without_a_table_has_no_tree(text):
    assert read_html_tree(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "<table><tr>" + "<td colspan=999999 rowspan=999999>a" * 1000,
        "<table><tr><td colspan=1000 rowspan=999999>a" + "<tr>" * 9000,
        "<table>" + "<tr><td>a" * 5000,
        "<table>" + "<tr><td><table>" * 900,
        "|" * 20_000 + "\n|",
        "a|b\n" * 9_000,
    ],
)
def test_hostile_tables_are_bounded(text):
    for grid in read_grids(text):
        assert len(grid.cells) <= MAX_PLACES
        grid.find_headings((0, 0), *DOWN)


def test_rows_0_is_all_that_follow():
    (grid,) = read_grids("<table><tr><td rowspan=0>a<td>b<tr><td>c<tr><td>d</table>")
    assert get_texts(grid, grid.neighbors((0, 0), *RIGHT)) == {"b", "c", "d"}


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(tables, "import_module", lambda name: __import__("no_such_module_here"))
    with pytest.raises(UserError, match=r"needs lxml: pip install 'vlm-grpo\[documents\]'"):
        import_extra("lxml.etree")
