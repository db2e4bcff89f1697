"""Tables in HTML and in markdown: as trees, their similarity (TEDS), and as cells with neighbors.

Reading is bounded: neither nested tags nor huge spans of a hostile text take long.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from vlm_grpo.errors import UserError

MAX_CHARACTERS = 50_000  #: Maximum length of a table's text: about 1,500 cells of HTML
MAX_SPAN = 1_000  #: Largest span of a cell in columns, as in HTML's standard
MAX_PLACES = 20_000  #: Maximum number of places in a grid; cells after them are left out
MAX_STEPS = 24_000_000
"""Maximum number of elementary steps of TEDS, which take a few tenths of a second."""
_STEPS_OF_A_ROW, _STEPS_OF_A_PAIR = 1_000, 4
"""What a call of numpy for a row counts for, and the matrices for a pair of nodes."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_SEPARATOR = frozenset("- :")
_SPANS = ("colspan", "rowspan")
_PRIVATE = 0x10_0000  # the first of the private characters that stand for tags within cells


def import_extra(name: str) -> Any:
    """Import a library of the extra ``documents``; raise UserError that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        remedy = "pip install 'vlm-grpo[documents]'"
        raise UserError(f"this task needs {name.partition('.')[0]}: {remedy}") from error


def parse_html(text: str) -> Any:
    """Return the root of a text as HTML, without comments, as lxml's parser repairs it."""
    etree = import_extra("lxml.etree")
    parser = etree.HTMLParser(remove_comments=True, remove_pis=True, encoding="utf-8")
    page = f"<html><body>{_CONTROL.sub('', text)}</body></html>"
    return etree.fromstring(page.encode(), parser)


@dataclass(frozen=True)
class Tree:
    """A table as an ordered tree; its nodes are in postorder, so the last one is the table."""

    # tag, column span and row span of each node; spans are 1 outside of cells
    kinds: tuple[tuple[str, int, int], ...]
    # each cell's text, where one private character stands for a tag within it
    texts: tuple[str, ...]
    leftmost: tuple[int, ...]  # position of each node's leftmost leaf
    inline: int = 0  # number of tags within cells

    @property
    def inner_keyroots(self) -> list[int]:
        """Nodes with children that have a left sibling, and the root, in postorder."""
        highest = {first: node for node, first in enumerate(self.leftmost)}
        return sorted(node for first, node in highest.items() if node > first)


@lru_cache(maxsize=1024)
def read_html_tree(text: str) -> Tree | None:
    """Return the tree of the first table in a text; None if there is none.

    ``th`` is read as ``td``. The text of a cell is that of Zhong et al. 2020: its characters and
    the tags within it.
    """
    found = None if len(text) > MAX_CHARACTERS else parse_html(text).find("body/table")
    return None if found is None else _build_tree(found)


def _build_tree(table: Any) -> Tree:
    kinds: list[tuple[str, int, int]] = []
    texts: list[str] = []
    leftmost: list[int] = []

    def add(node: Any) -> None:
        start = len(kinds)
        tag = "td" if node.tag == "th" else node.tag
        if tag != "td":
            for child in node:
                add(child)
        columns, rows = (_read_span(node.get(name)) if tag == "td" else 1 for name in _SPANS)
        kinds.append((tag, columns, rows))
        texts.append("".join(_list_tokens(node)) if tag == "td" else "")
        leftmost.append(start)

    add(table)
    inline = sum(1 for _ in table.iter()) - len(kinds)
    return Tree(tuple(kinds), tuple(texts), tuple(leftmost), inline)


def _read_span(value: str | None) -> int:
    text = (value or "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 1


def _list_tokens(node: Any) -> Iterator[str]:
    """Yield the text of a cell, and a private character for the start and the end of each tag."""
    yield node.text or ""
    for child in node:
        yield _tag_character(f"<{child.tag}>")
        yield from _list_tokens(child)
        yield _tag_character(f"</{child.tag}>")
        yield child.tail or ""


def _tag_character(tag: str) -> str:
    return chr(_PRIVATE + zlib.crc32(tag.encode()) % 0xFFFD)


def build_markdown_tree(rows: Sequence[Sequence[str]]) -> Tree:
    """Return the tree of rows of cells, as of ``<table><tr><td>``."""
    kinds: list[tuple[str, int, int]] = []
    texts: list[str] = []
    leftmost: list[int] = []
    for row in rows:
        start = len(kinds)
        kinds += [("td", 1, 1)] * len(row) + [("tr", 1, 1)]
        texts += [*row, ""]
        leftmost += [*range(start, start + len(row)), start]
    return Tree((*kinds, ("table", 1, 1)), (*texts, ""), (*leftmost, 0))


def teds(answer: Tree, gold: Tree, most_inline: int | None = None) -> float:
    """Compute the tree-edit-distance-based similarity of two tables, in [0, 1].

    It is 1 − D / max(N), with D the least number of inserted and deleted nodes and of renamed ones,
    where a cell with the same spans counts as the normalized edit distance of its text, and N the
    number of nodes below the table. Source: Zhong et al. 2020, Image-based table recognition,
    equation 1.

    In their script, N also counts tags within cells, so that a thousand empty ones in a wrong table
    earn nearly 1; here at most ``most_inline`` count (None: as many as the gold table has). Trees
    that would take more than ``MAX_STEPS`` earn 0, and no score is below 0.
    """
    if answer == gold:
        return 1.0
    pairs = ((answer, gold), (gold, answer))
    steps = [count_steps(*pair) for pair in pairs]
    if min(steps) > MAX_STEPS:
        return 0.0
    inline = min(answer.inline, gold.inline if most_inline is None else most_inline)
    most = max(len(answer.kinds) + inline, len(gold.kinds) + gold.inline) - 1
    return max(0.0, 1.0 - _edit_distance(*pairs[steps[0] > steps[1]]) / most) if most else 1.0


def drop_texts(tree: Tree) -> Tree:
    """Return a tree without the texts of its cells, which gives TEDS of the structure alone."""
    return replace(tree, texts=("",) * len(tree.texts))


@dataclass(frozen=True)
class _Forests:
    """Forests of a tree that do not contain each other, and have about as many nodes.

    Each begins at the first leaf of a keyroot and is a row of arrays, padded at the end.
    """

    nodes: np.ndarray  # the node in each column
    before: np.ndarray  # the place, among all rows, of the nodes left of its subtree
    is_first: np.ndarray  # whether its subtree has the keyroot's first leaf; false if padded


def _group_forests(tree: Tree) -> list[_Forests]:
    """Return the forests of a tree, those within others first."""
    groups: dict[tuple[int, int], list[int]] = {}
    levels: list[tuple[int, int]] = []  # outermost keyroots so far, and their levels
    for root in tree.inner_keyroots:
        start, level = tree.leftmost[root], 0
        while levels and levels[-1][0] >= start:
            level = max(level, levels.pop()[1] + 1)
        levels.append((root, level))
        groups.setdefault((level, (root - start).bit_length()), []).append(root)
    leftmost, forests = np.array(tree.leftmost), []
    for _, roots in sorted(groups.items()):
        ends = np.array(roots)[:, None]
        starts = leftmost[ends]
        width = int((ends - starts).max()) + 1
        columns = starts + np.arange(width)
        nodes = np.minimum(columns, ends)
        offsets = np.arange(len(roots))[:, None] * (width + 1)
        is_first = (leftmost[nodes] == starts) & (columns <= ends)
        forests.append(_Forests(nodes, leftmost[nodes] - starts + offsets, is_first))
    return forests


def count_steps(first: Tree, second: Tree) -> int:
    """Return the number of elementary steps in which the distance of two trees is computed."""
    rows = sum(root - first.leftmost[root] + 1 for root in first.inner_keyroots)
    columns = sum(_STEPS_OF_A_ROW + forests.nodes.size for forests in _group_forests(second))
    return rows * columns + _STEPS_OF_A_PAIR * len(first.kinds) * len(second.kinds)


def _edit_distance(first: Tree, second: Tree) -> float:
    """Compute the edit distance of ordered trees by the algorithm of Zhang and Shasha (1989).

    A leaf against a tree costs the tree's other nodes plus the cheapest renaming; this closed form
    leaves only the keyroots with children to the dynamic program.
    """
    numbers = {kind: i for i, kind in enumerate({*first.kinds, *second.kinds})}
    kinds = [np.array([numbers[kind] for kind in tree.kinds]) for tree in (first, second)]
    scorer = Levenshtein.normalized_distance
    texts = cdist(first.texts, second.texts, scorer=scorer, dtype=np.float64)
    # The cost of renaming each node of one tree to each of the other.
    costs = np.where(kinds[0][:, None] == kinds[1][None, :], texts, 1.0)
    trees = _compare_leaves(costs.T, second).T
    inner = np.array(first.leftmost) < np.arange(len(costs))
    trees[inner] = _compare_leaves(costs, first)[inner]
    forests = _group_forests(second)
    for root in first.inner_keyroots:
        for others in forests:
            _compare_forests(first.leftmost, root, others, costs, trees)
    return float(trees[-1, -1])


def _compare_leaves(costs: np.ndarray, tree: Tree) -> np.ndarray:
    """Return the distance of each subtree of a tree (rows) to each node as a leaf (columns)."""
    least, waiting = costs.copy(), []
    for node, start in enumerate(tree.leftmost):
        while waiting and waiting[-1] >= start:
            np.minimum(least[node], least[waiting.pop()], out=least[node])
        waiting.append(node)
    return least + (np.arange(len(costs)) - np.array(tree.leftmost))[:, None]


def _compare_forests(
    leftmost: Sequence[int], root: int, others: _Forests, costs: np.ndarray, trees: np.ndarray
) -> None:
    """Fill in the distances of the subtrees that begin at the first leaves of keyroots: ``root`` of
    the first tree, and all of a group of the second."""
    start, (count, width) = leftmost[root], others.nodes.shape
    columns = np.arange(width + 1.0)
    rows = np.empty((root - start + 2, count, width + 1))
    rows[0] = columns
    for x in range(start, root + 1):
        above, row = rows[x - start], rows[x - start + 1]
        best = rows[leftmost[x] - start].ravel()[others.before] + trees[x][others.nodes]
        if leftmost[x] == start:
            best = np.where(others.is_first, above[:, :-1] + costs[x][others.nodes], best)
        row[:, 0] = x - start + 1
        np.minimum(best, above[:, 1:] + 1.0, out=row[:, 1:])
        # Inserted nodes cost 1 each: the least of all places to the left, at that distance.
        np.minimum.accumulate(row - columns, axis=1, out=row)
        row += columns
        if leftmost[x] == start:
            trees[x, others.nodes[others.is_first]] = row[:, 1:][others.is_first]


Place = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """A cell of a row; its spans are numbers of columns and of rows, 0 rows: all that follow."""

    text: str
    is_heading: bool
    columns: int = 1
    rows: int = 1


class Grid:
    """The cells of a table, each named by its first row and column.

    It is built of the cells of each row, which follow those that reach down into it.
    """

    def __init__(self, table: Sequence[Sequence[Cell]]) -> None:
        self.cells: dict[Place, Cell] = {}
        self._covered: dict[Place, Place] = {}
        self._ends: dict[Place, Place] = {}
        reaching: dict[int, tuple[Place, int]] = {}  # by column: a cell, and its last row
        for row, cells in enumerate(table):
            reaching = {c: found for c, found in reaching.items() if found[1] >= row}
            widest = max(reaching, default=-1)
            waiting, column = deque(cells), 0
            while (waiting or column <= widest) and len(self._covered) < MAX_PLACES:
                if column in reaching:
                    self._covered[row, column] = reaching[column][0]
                elif waiting:
                    cell, place = waiting.popleft(), (row, column)
                    last = min(row + (cell.rows or len(table)), len(table)) - 1
                    end = column + min(cell.columns or 1, MAX_SPAN) - 1
                    self.cells[place], self._ends[place] = cell, (last, end)
                    for own in range(column, end + 1):
                        self._covered[row, own] = place
                        reaching[own] = (place, last)
                    column = end
                column += 1
        self._size = [max((place[axis] for place in self._covered), default=0) for axis in (0, 1)]

    def neighbors(self, cell: Place, down: int, right: int) -> set[Place]:
        """Return the next cells in a direction, such as (1, 0) for below, from all of a cell's
        rows or columns, over gaps."""
        last, end = self._ends[cell]
        starts = (
            [(last if down > 0 else cell[0], column) for column in range(cell[1], end + 1)]
            if down
            else [(row, end if right > 0 else cell[1]) for row in range(cell[0], last + 1)]
        )
        found = (self._find_next(cell, start, (down, right)) for start in starts)
        return {other for other in found if other is not None}

    def _find_next(self, cell: Place, start: Place, step: tuple[int, int]) -> Place | None:
        row, column = start[0] + step[0], start[1] + step[1]
        while 0 <= row <= self._size[0] and 0 <= column <= self._size[1]:
            other = self._covered.get((row, column), cell)
            if other != cell:
                return other
            row, column = row + step[0], column + step[1]
        return None

    def find_headings(self, cell: Place, down: int, right: int) -> set[Place]:
        """Return the headings on the way in a direction, or else the last cells on it."""
        visited, ends, waiting = {cell}, set(), [cell]
        while waiting:
            following = self.neighbors(current := waiting.pop(), down, right)
            if not following:
                ends.add(current)
            waiting += following - visited
            visited |= following
        headings = {place for place in visited if self.cells[place].is_heading}
        return headings - {cell} or ends - {cell}


def read_grids(text: str, markdown: bool = True, html: bool = True) -> list[Grid]:
    """Return the tables of a text that have cells: those in markdown, of at least two lines, before
    those in HTML."""
    tables: list[list[list[Cell]]] = []
    for rows in read_markdown_rows(text, least=2) if markdown else ():
        cells = [[Cell(x, not (i and j)) for j, x in enumerate(row)] for i, row in enumerate(rows)]
        tables.append(cells)
    if html and "<table" in text.lower():
        tables += map(_list_cells, parse_html(text).iter("table"))
    return [grid for table in tables if (grid := Grid(table)).cells]


def read_html_rows(text: str) -> list[list[str]]:
    """Return the texts of the cells of the first table in a text, by row."""
    rows = _list_cells(parse_html(text).find("body/table"))
    return [[cell.text for cell in row] for row in rows if row]


def _list_cells(table: Any) -> list[list[Cell]]:
    rows = []
    for row in table.iter("tr"):
        is_heading = next(row.iterancestors("thead"), None) is not None
        rows.append([])
        for cell in row:
            if cell.tag in ("td", "th"):
                columns, spanned = (_read_span(cell.get(name)) for name in _SPANS)
                text = "".join(_list_texts(cell)).strip()
                rows[-1].append(Cell(text, is_heading or cell.tag == "th", columns, spanned))
    return rows


def _list_texts(cell: Any) -> Iterator[str]:
    for node in cell.iter():
        yield ("\n" if node.tag == "br" else node.text) or ""
        if node is not cell:
            yield node.tail or ""


def read_markdown_rows(text: str, least: int = 1) -> list[list[list[str]]]:
    """Return the rows of cells of each table in a markdown text: ``least`` or more adjoining lines
    with a ``|``."""
    blocks: list[list[str]] = [[]]
    for line in text.strip().split("\n"):
        if "|" in line:
            blocks[-1].append(line)
        else:
            blocks.append([])
    tables = (
        [_split_row(x) for x in block if not set(x.replace("|", "").strip()) <= _SEPARATOR]
        for block in blocks
        if len(block) >= least
    )
    return [table for table in tables if table]


def _split_row(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")]
    return cells[cells[0] == "" : len(cells) - (cells[-1] == "")]
