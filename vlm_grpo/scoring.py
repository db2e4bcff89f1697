"""How near an answer is to the truth: overlaps of boxes, matching, and edit distances.

Boxes are xyxy tuples; the unit cancels out. Nothing is clipped to an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pycocotools import mask
from rapidfuzz.distance import Levenshtein
from scipy.optimize import linear_sum_assignment

Box = tuple[float, float, float, float]
Boxes = Sequence[Box]


def iou_matrix(predicted: Boxes, gold: Boxes) -> np.ndarray:
    """Intersection over union of every pair, (P, G), as pycocotools computes it."""
    if not predicted or not gold:
        return np.zeros((len(predicted), len(gold)))
    return np.asarray(mask.iou(_xywh(predicted), _xywh(gold), [0] * len(gold)))


def iou(first: Box, second: Box) -> float:
    """Intersection over union of two boxes, in [0, 1].

    >>> iou((0, 0, 2, 2), (0, 0, 2, 1))
    0.5
    """
    return float(iou_matrix([first], [second])[0, 0])


def giou(first: Box, second: Box) -> float:
    """Generalised IoU of two boxes, in (-1, 1]: IoU − (hull − union) / hull.

    Source: Rezatofighi et al. 2019, Generalized Intersection over Union, algorithm 1.
    """
    a, b = np.asarray(first, float), np.asarray(second, float)
    hull = float(np.prod(np.maximum(a[2:], b[2:]) - np.minimum(a[:2], b[:2])))
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    inner = float(np.prod(np.maximum(sides, 0.0)))
    union = float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2])) - inner
    return inner / union - (hull - union) / hull


def match(scores: np.ndarray) -> list[tuple[int, int]]:
    """The one-to-one assignment of rows to columns with the largest sum of scores.

    Args:
        scores: (rows, columns), larger is better.
    """
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def matched_iou(predicted: Boxes, gold: Boxes) -> float:
    """Sum of IoU over the best one-to-one matching, divided by the larger of the two counts.

    For one box against one it is their IoU. A missing box and an extra one cost alike; two
    empty sets agree, 1.0.
    """
    larger = max(len(predicted), len(gold))
    if larger == 0:
        return 1.0
    overlaps = iou_matrix(predicted, gold)
    return float(sum(overlaps[pair] for pair in match(overlaps))) / larger


def character_error_rate(predicted: str, gold: str) -> float:
    """Edit distance over the gold's length, cut off at 1; an empty gold allows nothing.

    >>> character_error_rate("abcd", "abxy")
    0.5
    """
    if not gold:
        return float(bool(predicted))
    # Beyond the gold's length the rate is cut off anyway, which lets the library stop early.
    distance = Levenshtein.distance(predicted, gold, score_cutoff=len(gold))
    return min(1.0, distance / len(gold))


def anls(predicted: str, gold: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity of one question, over its accepted answers.

    1 − NL where NL, the distance over the longer length, is below 0.5, else 0; the best over
    the accepted answers; letters' case and the amount of white space do not count.

    Source: Biten et al. 2019, Scene Text Visual Question Answering, equation 1.

    >>> anls("EXIT", ["Exit sign", "exit"])
    1.0
    """
    distances = [Levenshtein.normalized_distance(_plain(predicted), _plain(g)) for g in gold]
    nearest = min(distances)
    return 1.0 - nearest if nearest < 0.5 else 0.0


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _xywh(boxes: Boxes) -> np.ndarray:
    array = np.array(boxes, float)
    array[:, 2:] -= array[:, :2]
    return array
