"""A benchmark's own rules on a task's answers, and the groups by which it is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlm_grpo.benchmarks import metrics as official
from vlm_grpo.coordinates import Box, gold_boxes
from vlm_grpo.scoring import coco_average_precision, iou, iou_matrix
from vlm_grpo.types import Example

Rule = Callable[[Any, Example], float]
"""``(answer, example)`` to a value; it is called only where there is an answer."""
CorpusRule = Callable[[Sequence[Any | None], Sequence[Example]], float]
"""``(answers, examples)`` of a whole set to one value."""

_ROUNDING = 1e-9
"""In an IoU: the rounding of floating-point numbers must not decide at a threshold."""
_COCO_SIZES = ((32**2, "small"), (96**2, "medium"), (float("inf"), "large"))
_THRESHOLDS = np.arange(0.5, 1.0, 0.05)


def rule_values(name: str, answers: Sequence[Any | None], examples: Sequence[Example]) -> list:
    """A rule's value for each answer; no answer earns 0.

    Args:
        name: a key of ``RULES``.
        answers: what ``Task.read`` returned for each example.
        examples: the rows, in the same order.
    """
    rule = RULES[name]
    pairs = zip(answers, examples, strict=True)
    return [0.0 if answer is None else float(rule(answer, example)) for answer, example in pairs]


def get_group(name: str, example: Example) -> str:
    """The group that an example belongs to, as text.

    Args:
        name: "answer" (the gold answer itself), "size" (COCO's areas of the gold box), "size_128"
            (Ref-L4's), or a key of ``Example.meta``; a key that is missing gives "unknown".
            Examples without exactly one box have no size; their number of boxes is the group.
    """
    if name == "answer":
        return str(example.answer)
    if name in ("size", "size_128"):
        boxes = gold_boxes(example.answer)
        if len(boxes) != 1:
            return f"{len(boxes)} boxes"
        x1, y1, x2, y2 = boxes[0]
        return _size(name, (x2 - x1) * (y2 - y1))
    return str(example.meta.get(name, "unknown"))


def _size(name: str, area: float) -> str:
    if name == "size":
        return next(size for largest, size in _COCO_SIZES if area <= largest)
    side = area**0.5
    return "small" if side < 128 else "medium" if side <= 256 else "large"


def _golds(example: Example) -> list[str]:
    return [example.answer] if isinstance(example.answer, str) else list(example.answer)


def _overlap(answer: Sequence[Box], example: Example) -> float:
    """IoU of one box with one box; several boxes are no answer to these benchmarks."""
    gold = gold_boxes(example.answer)
    return iou(answer[0], gold[0]) if len(answer) == len(gold) == 1 else 0.0


def _nms_ap(answers: Sequence[Any | None], examples: Sequence[Example]) -> float:
    """OVDEval's NMS-AP: around each gold box (IoU > 0.5) only the first detection is left.

    Labels play no part in the suppression, so listing one place under every label gains nothing.
    With equal confidences the official script keeps an arbitrary one; here it is the first.
    """
    found, golds = [], []
    for answer, example in zip(answers, examples, strict=True):
        gold = gold_boxes(example.answer)
        overlaps = iou_matrix([box for box, _ in answer or ()], gold) > 0.5
        near = [np.flatnonzero(column).tolist() for column in overlaps.T]
        kept = {rows[0] for rows in near if rows}
        removed = {row for rows in near for row in rows[1:]} - kept
        found.append([pair for i, pair in enumerate(answer or ()) if i not in removed])
        labels = [" ".join(label.casefold().split()) for label in example.answer["labels"]]
        golds.append(list(zip(gold, labels, strict=True)))
    return coco_average_precision(found, golds).get("ap", 0.0)


def _error_rate(words: bool) -> CorpusRule:
    def rate(answers: Sequence[Any | None], examples: Sequence[Example]) -> float:
        golds = [_golds(example)[0] for example in examples]
        return official.error_rate([answer or "" for answer in answers], golds, words)

    return rate


RULES: dict[str, Rule] = {
    "ocrbench": lambda a, e: official.ocrbench(a, _golds(e), e.meta.get("dataset_name", "")),
    "ocrbench_v2": lambda a, e: official.ocrbench_v2(
        a, _golds(e), e.meta["type"], e.meta.get("eval")
    ),
    "vqa_accuracy": lambda a, e: official.vqa_accuracy(a, _golds(e), e.meta.get("answers", 10)),
    "anls_rrc": lambda a, e: official.anls_rrc(a, _golds(e)),
    "word_recognition": lambda a, e: official.word_recognition(a, _golds(e)),
    "accuracy_above_50": lambda a, e: _overlap(a, e) > 0.5 + _ROUNDING,
    "accuracy_above_75": lambda a, e: _overlap(a, e) > 0.75 + _ROUNDING,
    "accuracy_above_90": lambda a, e: _overlap(a, e) > 0.9 + _ROUNDING,
    "mean_accuracy_above": lambda a, e: float(np.mean(_overlap(a, e) > _THRESHOLDS + _ROUNDING)),
}
"""Rules of one answer: IoU > t (where the tasks' own accuracy is IoU ≥ t), and those of OCR."""

CORPUS_RULES: dict[str, CorpusRule] = {
    "nms_ap": _nms_ap,
    "cer_micro": _error_rate(words=False),
    "wer_micro": _error_rate(words=True),
}
"""Rules of a whole set."""
