"""Scoring rules of benchmarks for the answers of a task, and the groups of their reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlm_grpo.benchmarks import metrics as official
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.scores import anls, coco_average_precision, iou, iou_matrix
from vlm_grpo.types import Example

ExampleRule = Callable[[Any, Example], float]
"""Maps ``(answer, example)`` to a value; the answer is None if the output holds none."""
CorpusRule = Callable[[Sequence[Any | None], Sequence[Example]], float]
"""Maps ``(answers, examples)`` of a dataset to one value."""

_ROUNDING = 1e-9
"""Margin at a threshold of IoU, so that floating-point rounding does not decide."""
_THRESHOLDS = np.arange(0.5, 1.0, 0.05)


def apply_rule(name: str, answers: Sequence[Any | None], examples: Sequence[Example]) -> list:
    """Return the value of a key of ``RULES`` for the result of ``Task.read`` of each example."""
    return [float(RULES[name](a, e)) for a, e in zip(answers, examples, strict=True)]


def get_group(name: str, example: Example) -> str:
    """Return the group of an example, as text.

    ``name`` is "answer" (the gold answer itself), "size" (of the gold box, by COCO's areas),
    "size_128" (by Ref-L4's), or a key of ``Example.meta``; a missing key gives "unknown". Examples
    without exactly one box have no size; their group is the number of boxes.
    """
    if name == "answer":
        return str(example.answer)
    if name in ("size", "size_128"):
        boxes = gold_boxes(example.answer)
        if len(boxes) != 1:
            return f"{len(boxes)} boxes"
        x1, y1, x2, y2 = boxes[0]
        area = (x2 - x1) * (y2 - y1)
        if name == "size":
            return "small" if area <= 32**2 else "medium" if area <= 96**2 else "large"
        return "small" if area**0.5 < 128 else "medium" if area**0.5 <= 256 else "large"
    return str(example.meta.get(name, "unknown"))


def _get_golds(example: Example) -> list[str]:
    return [example.answer] if isinstance(example.answer, str) else list(example.answer)


def _get_annotations(example: Example) -> list[str]:
    """Return the answers of all annotators; the rows of TextVQA leave out empty ones."""
    golds = _get_golds(example)
    return [*golds, *[""] * (example.meta.get("answers", 0) - len(golds))]


def _compute_iou(answer: Sequence[Box] | None, example: Example) -> float:
    """Return the IoU of a single box; several boxes are not an answer to these benchmarks."""
    gold = gold_boxes(example.answer)
    return iou(answer[0], gold[0]) if answer and len(answer) == len(gold) == 1 else 0.0


def _compute_rmse(answers: Sequence[Any | None], examples: Sequence[Example]) -> float:
    return float(np.sqrt(np.mean(np.square(apply_rule("mae", answers, examples)))))


def _nms_ap(answers: Sequence[Any | None], examples: Sequence[Example]) -> float:
    """Compute OVDEval's NMS-AP: around each gold box (IoU > 0.5) only the last detection is kept.

    The suppression ignores labels, so listing one box under every label gains nothing. All
    confidences are equal, and of up to 16 equal ones the script's reversed argsort takes the last;
    of more it takes one that depends on the machine.
    """
    found, golds = [], []
    for answer, example in zip(answers, examples, strict=True):
        gold = gold_boxes(example.answer)
        overlaps = iou_matrix([box for box, _ in answer or ()], gold) > 0.5
        near = [np.flatnonzero(column).tolist() for column in overlaps.T]
        kept = {rows[-1] for rows in near if rows}
        removed = {row for rows in near for row in rows[:-1]} - kept
        found.append([pair for i, pair in enumerate(answer or ()) if i not in removed])
        labels = [" ".join(label.casefold().split()) for label in example.answer["labels"]]
        golds.append(list(zip(gold, labels, strict=True)))
    return coco_average_precision(found, golds).get("ap", 0.0)


def _build_error_rate(words: bool) -> CorpusRule:
    def rate(answers: Sequence[Any | None], examples: Sequence[Example]) -> float:
        golds = [_get_golds(example)[0] for example in examples]
        return official.error_rate([answer or "" for answer in answers], golds, words)

    return rate


def _build_choice_accuracy(*keys: str) -> CorpusRule:
    """Return the rule of the mean of means over groups by the first key, each the mean of means
    over groups by the next one, down to the share of right options."""

    def accuracy(answers: Sequence[int | None], examples: Sequence[Example]) -> float:
        if not keys:
            golds = [e.answer["options"].index(e.answer["answer"]) for e in examples]
            return float(np.mean([a == gold for a, gold in zip(answers, golds, strict=True)]))
        groups: dict[Any, list] = {}
        for pair in zip(answers, examples, strict=True):
            groups.setdefault(pair[1].meta.get(keys[0]), []).append(pair)
        within = _build_choice_accuracy(*keys[1:])
        return float(np.mean([within(*zip(*pairs, strict=True)) for pairs in groups.values()]))

    return accuracy


def _circular(answers: Sequence[int | None], examples: Sequence[Example]) -> float:
    """Compute the share of questions that are right in every rotation of their options."""
    is_right: dict[Any, bool] = {}
    for answer, example in zip(answers, examples, strict=True):
        circle, options = example.meta.get("circle", example.id), example.answer["options"]
        right = answer is not None and options[answer] == example.answer["answer"]
        is_right[circle] = is_right.get(circle, True) and right
    return float(np.mean(list(is_right.values())))


RULES: dict[str, ExampleRule] = {
    "ocrbench": lambda a, e: official.ocrbench(
        a or "", _get_golds(e), e.meta.get("dataset_name", "")
    ),
    "ocrbench_v2": lambda a, e: official.ocrbench_v2(
        a or "", _get_golds(e), e.meta["type"], e.meta.get("eval")
    ),
    "vqa_accuracy": lambda a, e: official.vqa_accuracy(a or "", _get_annotations(e)),
    "anls": lambda a, e: anls(a or "", _get_golds(e)),
    "anls_rrc": lambda a, e: official.anls_rrc(a or "", _get_golds(e)),
    "relaxed_accuracy": lambda a, e: official.relaxed_accuracy(a or "", _get_golds(e)),
    "mathvista": lambda a, e: official.mathvista(a or "", e.answer, e.meta),
    "word_recognition": lambda a, e: official.word_recognition(a or "", _get_golds(e)),
    "accuracy_above_50": lambda a, e: _compute_iou(a, e) > 0.5 + _ROUNDING,
    "accuracy_above_75": lambda a, e: _compute_iou(a, e) > 0.75 + _ROUNDING,
    "accuracy_above_90": lambda a, e: _compute_iou(a, e) > 0.9 + _ROUNDING,
    "mean_accuracy_above": lambda a, e: float(
        np.mean(_compute_iou(a, e) > _THRESHOLDS + _ROUNDING)
    ),
    "mae": lambda a, e: abs((len(a) if isinstance(a, tuple) else a or 0) - e.answer),
}
"""Rules for single answers: OCR; charts; IoU > t, whereas the accuracy of the tasks is IoU ≥ t; and
the error of a count, where an output without a count counts as 0."""

CORPUS_RULES: dict[str, CorpusRule] = {
    "cv_bench": _build_choice_accuracy("type", "source"),
    "blink": _build_choice_accuracy("task"),
    "circular": _circular,
    "nms_ap": _nms_ap,
    "rmse_all": _compute_rmse,
    "cer_micro": _build_error_rate(words=False),
    "wer_micro": _build_error_rate(words=True),
}
"""Rules for a dataset."""
