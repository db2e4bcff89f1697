"""Scores of an answer against the gold answer: box overlap, matching and edit distance.

Boxes are xyxy tuples in any common unit. They are not clipped to an image.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from vlm_grpo.task.coordinates import Box

Boxes = Sequence[Box]


def iou_matrix(predicted: Boxes, gold: Boxes) -> np.ndarray:
    """Compute the (predicted, gold) intersection over union of boxes by pycocotools."""
    if not predicted or not gold:
        return np.zeros((len(predicted), len(gold)))
    from pycocotools import mask

    return np.asarray(mask.iou(_to_xywh(predicted), _to_xywh(gold), [0] * len(gold)))


def iou(first: Box, second: Box) -> float:
    """Compute the intersection over union of two boxes, in [0, 1].

    >>> iou((0, 0, 2, 2), (0, 0, 2, 1))
    0.5
    """
    return float(iou_matrix([first], [second])[0, 0])


def giou_matrix(predicted: Boxes, gold: Boxes) -> np.ndarray:
    """Compute the (predicted, gold) generalized IoU: IoU − (hull − union) / hull, in (-1, 1].

    The hull is the smallest box that encloses both. Source: Rezatofighi et al. 2019, Generalized
    Intersection over Union, algorithm 1.

    >>> giou_matrix([(0, 0, 1, 1)], [(3, 0, 4, 1)]).tolist()
    [[-0.5]]
    """
    if not predicted or not gold:
        return np.zeros((len(predicted), len(gold)))
    p, g = np.array(predicted, float)[:, None], np.array(gold, float)[None, :]
    hull = np.prod(np.maximum(p[..., 2:], g[..., 2:]) - np.minimum(p[..., :2], g[..., :2]), -1)
    sides = np.minimum(p[..., 2:], g[..., 2:]) - np.maximum(p[..., :2], g[..., :2])
    inner = np.prod(np.maximum(sides, 0.0), -1)
    union = np.prod(p[..., 2:] - p[..., :2], -1) + np.prod(g[..., 2:] - g[..., :2], -1) - inner
    return inner / union - (hull - union) / hull


def match(scores: np.ndarray) -> list[tuple[int, int]]:
    """Compute the one-to-one assignment of rows to columns with the largest sum of scores."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def matched_mean(scores: np.ndarray) -> float:
    """Divide the sum of scores of the best one-to-one matching by the larger of P and G.

    Missing and extra answers cost the same; without any, the result is 1.0. ``scores`` are (P, G)
    values in [0, 1], of each answer with each gold answer.
    """
    larger_count = max(scores.shape)
    if larger_count == 0:
        return 1.0
    return float(sum(scores[pair] for pair in match(scores))) / larger_count


def f1(true_positives: int, predicted: int, gold: int) -> float:
    """Compute the harmonic mean of precision and recall, 2TP / (P + G); 1.0 for two empty sets."""
    return 2.0 * true_positives / (predicted + gold) if predicted + gold else 1.0


def accuracy_by_gold(golds: Sequence[Any], hits: Sequence[bool]) -> dict[str, float]:
    """Return the accuracy by gold answer (``exact_of_…``), and that of always giving the most
    frequent one (``majority_baseline``); empty without gold answers."""
    by_gold: dict[Any, list[bool]] = {}
    for gold, hit in sorted(zip(golds, hits, strict=True), key=lambda pair: pair[0]):
        by_gold.setdefault(gold, []).append(hit)
    accuracies = {f"exact_of_{gold}": sum(own) / len(own) for gold, own in by_gold.items()}
    most = max(map(len, by_gold.values()), default=0)
    return {"majority_baseline": most / len(golds), **accuracies} if golds else {}


def error_rate(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """Compute the character error rate of a text, or the word error rate of a list of words: the
    edit distance divided by the length of the gold one, at most 1.

    With an empty gold text any prediction has the rate 1.

    >>> error_rate("abcd", "abxy"), error_rate(["no", "exit"], ["no", "way", "out"])
    (0.5, 0.6666666666666666)
    """
    if not gold:
        return float(bool(predicted))
    # The rate is capped at 1, so the library can stop at this distance.
    distance = Levenshtein.distance(predicted, gold, score_cutoff=len(gold))
    return min(1.0, distance / len(gold))


def anls(predicted: str, gold: Sequence[str]) -> float:
    """Compute the average normalized Levenshtein similarity of one question.

    It is 1 − NL if NL, the edit distance divided by the longer length, is below 0.5, otherwise 0,
    for the best of the accepted answers, of which there is at least one. Case and amount of white
    space are ignored. Source: Biten et al. 2019, Scene Text Visual Question Answering, equation 1.

    >>> anls("EXIT", ["Exit sign", "exit"])
    1.0
    """
    text, *accepted = (" ".join(side.lower().split()) for side in (predicted, *gold))
    smallest = min(Levenshtein.normalized_distance(text, other) for other in accepted)
    return 1.0 - smallest if smallest < 0.5 else 0.0


def _to_xywh(boxes: Boxes) -> np.ndarray:
    array = np.array(boxes, float)
    array[:, 2:] -= array[:, :2]
    return array
