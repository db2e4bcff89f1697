"""How near an answer is to the truth: overlaps of boxes, matching, and edit distances.

Boxes are xyxy tuples; the unit cancels out. Nothing is clipped to an image.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
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
    """Generalised IoU of two boxes, in (-1, 1]: IoU less the empty share of their hull.

    >>> giou((0, 0, 1, 1), (3, 0, 4, 1))
    -0.5
    """
    return float(giou_matrix([first], [second])[0, 0])


def giou_matrix(predicted: Boxes, gold: Boxes) -> np.ndarray:
    """Generalised IoU of every pair, (P, G): IoU − (hull − union) / hull.

    Source: Rezatofighi et al. 2019, Generalized Intersection over Union, algorithm 1.
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
    """The one-to-one assignment of rows to columns with the largest sum of scores.

    Args:
        scores: (rows, columns), larger is better.
    """
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def matched_mean(scores: np.ndarray) -> float:
    """Sum of the scores over the best one-to-one matching, divided by the larger count.

    For one answer against one gold it is their score. A missing answer and an extra one cost
    alike; two empty sets agree, 1.0.

    Args:
        scores: (P, G), the score of each answer with each gold, in [0, 1].
    """
    larger = max(scores.shape)
    if larger == 0:
        return 1.0
    return float(sum(scores[pair] for pair in match(scores))) / larger


def f1(true_positives: int, predicted: int, gold: int) -> float:
    """2TP / (P + G): the harmonic mean of precision and recall; 1.0 where both sets are empty."""
    return 2.0 * true_positives / (predicted + gold) if predicted + gold else 1.0


def coco_average_precision(
    predicted: Sequence[Sequence[tuple[Box, str]]], gold: Sequence[Sequence[tuple[Box, str]]]
) -> dict[str, float]:
    """COCO's box AP by pycocotools: ``ap`` (IoU 0.50 to 0.95), ``ap_50`` and ``ap_75``.

    Models write no confidence that could be trusted, so every detection has the same and they
    rank as written. COCO counts the first 100 of an image and class.

    Args:
        predicted: for each image its labelled boxes.
        gold: the same for the truth; with no box at all in it the result is empty.
    """
    labels = sorted({label for boxes in (*predicted, *gold) for _, label in boxes})
    names = {label: number for number, label in enumerate(labels)}
    truth, detections = _coco_rows(gold, names), _coco_rows(predicted, names)
    if not truth:
        return {}
    if not detections:
        return {"ap": 0.0, "ap_50": 0.0, "ap_75": 0.0}
    dataset: Any = {
        "images": [{"id": number} for number in range(len(gold))],
        "categories": [{"id": number} for number in range(len(names))],
        "annotations": truth,
    }
    with redirect_stdout(io.StringIO()):  # pycocotools talks
        coco = COCO()
        coco.dataset = dataset
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")  # type: ignore[arg-type]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    ap, ap_50, ap_75 = evaluation.stats[:3].tolist()
    return {"ap": ap, "ap_50": ap_50, "ap_75": ap_75}


def _coco_rows(images: Sequence[Sequence[tuple[Box, str]]], names: Mapping[str, int]) -> list[dict]:
    rows = []
    for image, boxes in enumerate(images):
        for (x1, y1, x2, y2), label in boxes:
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            more = {"image_id": image, "category_id": names[label], "score": 1.0}
            # Ids start at 1, because pycocotools takes a match with id 0 for no match.
            rows.append({"id": len(rows) + 1, "iscrowd": 0, **box, **more})
    return rows


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


def word_error_rate(predicted: str, gold: str) -> float:
    """Edit distance in words over the gold's number of words, cut off at 1.

    >>> word_error_rate("no exit", "no way out")
    0.6666666666666666
    """
    words = gold.split()
    if not words:
        return float(bool(predicted.split()))
    distance = Levenshtein.distance(predicted.split(), words, score_cutoff=len(words))
    return min(1.0, distance / len(words))


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


def repeated_share(text: str, n: int = 6) -> float:
    """The share of word n-grams that came before in the same text, in [0, 1].

    A word is a run of letters and digits, or one character of a script without spaces. Six
    words are longer than what the grammars of boxes repeat from one box to the next.

    >>> repeated_share("a b c d a b c d", n=4)
    0.2
    """
    words = _WORDS.findall(text.lower())
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return (len(grams) - len(set(grams))) / len(grams) if grams else 0.0


# Thai, Lao, Burmese, Khmer, kana and Chinese characters.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_WORDS = re.compile(rf"[{_SPACELESS}]|[^\W_{_SPACELESS}]+")


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _xywh(boxes: Boxes) -> np.ndarray:
    array = np.array(boxes, float)
    array[:, 2:] -= array[:, :2]
    return array
