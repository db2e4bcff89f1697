"""The similarity of two tables by their tree edit distance (TEDS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

MAX_WORK = 8_000_000
"""Maximum number of steps of the dynamic program, which take about two seconds."""


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
    def work(self) -> int:
        """The number of forests that begin at a keyroot with children."""
        return sum(root - self.leftmost[root] + 1 for root in self.inner_keyroots)

    @property
    def inner_keyroots(self) -> list[int]:
        """Nodes with children that have a left sibling, and the root, in postorder."""
        highest = {first: node for node, first in enumerate(self.leftmost)}
        return sorted(node for first, node in highest.items() if node > first)


def teds(answer: Tree, gold: Tree, most_inline: int | None = None) -> float:
    """Compute the tree-edit-distance-based similarity of two tables, in [0, 1].

    It is 1 − D / max(N), with D the least number of inserted and deleted nodes and of renamed ones,
    where a cell with the same spans counts as the normalized edit distance of its text, and N the
    number of nodes below the table. Source: Zhong et al. 2020, Image-based table recognition,
    equation 1.

    In their script, N also counts tags within cells, so that a thousand empty ones in a wrong table
    earn nearly 1; here at most ``most_inline`` count (None: as many as the gold table has). Trees
    that would take too long (``MAX_WORK``) earn 0, and no score is below 0.
    """
    if answer == gold:
        return 1.0
    if answer.work * gold.work > MAX_WORK:
        return 0.0
    inline = min(answer.inline, gold.inline if most_inline is None else most_inline)
    most = max(len(answer.kinds) + inline, len(gold.kinds) + gold.inline) - 1
    return max(0.0, 1.0 - _edit_distance(answer, gold) / most) if most else 1.0


def drop_texts(tree: Tree) -> Tree:
    """Return a tree without the texts of its cells, which gives TEDS of the structure alone."""
    return replace(tree, texts=("",) * len(tree.texts))


def _rename_costs(first: Tree, second: Tree) -> np.ndarray:
    """Return the cost of renaming each node of one tree to each of another, in [0, 1]."""
    numbers = {kind: i for i, kind in enumerate({*first.kinds, *second.kinds})}
    kinds = [np.array([numbers[kind] for kind in tree.kinds]) for tree in (first, second)]
    scorer = Levenshtein.normalized_distance
    texts = cdist(first.texts, second.texts, scorer=scorer, dtype=np.float64)
    return np.where(kinds[0][:, None] == kinds[1][None, :], texts, 1.0)


def _edit_distance(first: Tree, second: Tree) -> float:
    """Compute the edit distance of ordered trees by the algorithm of Zhang and Shasha (1989).

    A leaf against a tree costs the tree's other nodes plus the cheapest renaming; this closed form
    leaves only the keyroots with children to the dynamic program.
    """
    costs = _rename_costs(first, second)
    distances = np.zeros_like(costs)
    for node, start in enumerate(second.leftmost):
        distances[:, node] = costs[:, start : node + 1].min(1) + (node - start)
    for node, start in enumerate(first.leftmost):
        if node > start:
            distances[node] = costs[start : node + 1].min(0) + (node - start)
    trees, rows = distances.tolist(), costs.tolist()
    for root in first.inner_keyroots:
        for other in second.inner_keyroots:
            _compare_forests(first.leftmost, second.leftmost, (root, other), rows, trees)
    return trees[-1][-1]


def _compare_forests(
    left: Sequence[int],
    right: Sequence[int],
    roots: tuple[int, int],
    costs: list[list[float]],
    trees: list[list[float]],
) -> None:
    """Fill in the distances of the subtrees that begin at the first leaves of two keyroots."""
    start, begin = left[roots[0]], right[roots[1]]
    columns = [(y, right[y] == begin, right[y] - begin) for y in range(begin, roots[1] + 1)]
    forests: list[list[float]] = [[float(i) for i in range(len(columns) + 1)]]
    for x in range(start, roots[0] + 1):
        above, before = forests[-1], forests[left[x] - start]
        is_first, cost, tree = left[x] == start, costs[x], trees[x]
        last = above[0] + 1.0
        row = [last]
        for column, (y, is_whole, others) in enumerate(columns):
            both = is_first and is_whole
            best = above[column] + cost[y] if both else before[others] + tree[y]
            step = min(above[column + 1], last) + 1.0
            last = step if step < best else best
            if both:
                tree[y] = last
            row.append(last)
        forests.append(row)
