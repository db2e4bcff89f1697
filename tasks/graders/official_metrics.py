"""Official metrics of benchmarks, as rules for the answers of a task, and the groups of reports.

Each metric follows the benchmark's script, including its oddities, so that results are comparable
with published ones. All functions are pure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.parsing import NUMBER_WORDS
from vlm_grpo.task.scores import anls, iou, iou_matrix
from vlm_grpo.tasks.graders.average_precision import coco_average_precision
from vlm_grpo.types import Example


def ocrbench(text: str, answers: Sequence[str], dataset: str) -> float:
    """Compute OCRBench v1: 1 if the text contains an answer.

    Case is ignored; for handwritten formulas (dataset HME100k) spaces are ignored instead.
    Source: Liu et al. 2024, OCRBench; the authors' example.py.

    >>> ocrbench("It says CENTRE.", ["centre"], "IIIT5K")
    1.0
    >>> ocrbench("X ^ 2", ["x^2"], "HME100k")
    0.0
    """
    if dataset == "HME100k":
        return float(any(_compact(a) in _compact(text) for a in answers))
    return float(any(_join_lines(a.lower()) in _join_lines(text.lower()) for a in answers))


def vqa_accuracy(text: str, answers: Sequence[str]) -> float:
    """Compute VQA accuracy as defined by TextVQA.

    The mean, over the answers of ten annotators, of min(1, matches among the other answers / 3).
    Both sides are normalized, even if all annotators agree. Some answers may be missing.
    Source: Antol et al. 2015, VQA; Singh et al. 2019, TextVQA; the M4C evaluator.

    >>> vqa_accuracy("two", ["2", "2", "2"] + ["3"] * 7)
    0.9
    """
    normal = normalize_vqa(text)
    matches = sum(normal == normalize_vqa(answer) for answer in answers)
    if not matches:
        return 0.0
    # Without one of the matching answers there is one match fewer.
    total = matches * min(1.0, (matches - 1) / 3) + (10 - matches) * min(1.0, matches / 3)
    return total / 10


def normalize_vqa(text: str) -> str:
    """Normalize an answer as VQA's evaluation server does.

    Convert to lower case; number words up to ten to digits; remove articles, commas and question
    marks; remove a punctuation mark next to a space, and replace one inside a word with a space;
    restore the apostrophe of contractions. Only the first 32 periods are removed, because the
    script passes a flag (re.UNICODE) where ``re.sub`` takes a count.

    >>> normalize_vqa("The  Seven-Eleven store,  isnt it?")
    "7 eleven store isn't it"
    """
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    plain = text
    for mark in _MARKS:
        next_to_space = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if next_to_space else " ")
    plain = re.sub(r"\.(?!\d)", "", plain, count=32)
    words = [_NUMBERS.get(word, word) for word in plain.split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def anls_rrc(text: str, answers: Sequence[str]) -> float:
    """Compute ANLS as the script of the Robust Reading Competition does.

    It differs from the paper (``scores.anls``) in two ways: a similarity of exactly 0.5 counts,
    and the distance is computed on stripped texts in lower case but divided by the length of the
    unstripped ones in upper case, so that padding an answer with spaces raises it.
    Source: lmms-eval, api/metrics.py, and Qwen-VL, infographicsvqa_eval.py, after the script of
    https://rrc.cvc.uab.es.

    >>> anls_rrc("ab", ["ax"]), anls_rrc("ab" + 20 * " ", ["xy"])
    (0.5, 0.9090909090909091)
    """
    best = 0.0
    for answer in answers:
        first, second = " ".join(text.lower().split()), " ".join(answer.lower().split())
        length = max(len(text.upper()), len(answer.upper()))
        best = max(best, 1.0 - Levenshtein.distance(first, second) / length if length else 1.0)
    return best if best >= 0.5 else 0.0


def word_recognition(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the letters a–z and digits equal those of an answer; ignore other characters.

    The rule of IIIT5K, and "accuracy without case and symbols" of ICDAR 2015.

    >>> word_recognition("Coffee-Shop!", ["COFFEE SHOP"])
    1.0
    """
    return float(_keep_alphanumeric(text) in {_keep_alphanumeric(answer) for answer in answers})


def error_rate(texts: Sequence[str], golds: Sequence[str], words: bool = False) -> float:
    """Compute the character or word error rate of a dataset: (S + D + I) / N, summed first.

    It may exceed 1. Words are separated by white space, which Chinese texts do not have.

    >>> error_rate(["ab", "c"], ["ax", "cdef"])
    0.6666666666666666
    """
    pairs = [(t.split(), g.split()) if words else (t, g) for t, g in zip(texts, golds, strict=True)]
    length = sum(len(gold) for _, gold in pairs)
    if not length:
        raise ValueError("the gold texts are empty: there is no error rate")
    return sum(Levenshtein.distance(text, gold) for text, gold in pairs) / length


def _join_lines(text: str) -> str:
    return text.strip().replace("\n", " ")


def _compact(text: str) -> str:
    return _join_lines(text).replace(" ", "")


def _keep_alphanumeric(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBERS = {word: str(n) for word, n in NUMBER_WORDS.items() if n <= 10} | {"none": "0"}
_ONE_APOSTROPHE = (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's "
    "how'd how'll how's isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've "
    "o'clock oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll "
    "someone's something'd something'll that's there'd there're there's they'd they'll they're "
    "they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's "
    "where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd "
    "you'll you're you've"
)
_TWO_APOSTROPHES = (
    "couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've "
    "someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've y'all'll "
    "y'all'd've you'd've"
)


def _build_contractions() -> dict[str, str]:
    table = {word.replace("'", ""): word for word in _ONE_APOSTROPHE.split()}
    for word in _TWO_APOSTROPHES.split():
        first, *rest, last = word.split("'")
        table |= {first + "'".join([*rest, last]): word, "'".join([first, *rest]) + last: word}
    # y'all'd've has a third form; the server's table has somebody'd reversed.
    third = {"y'alld've": "y'all'd've", "'ows'at": "'ow's'at"}
    return table | third | {"somebody'd": "somebodyd"}


_CONTRACTIONS = _build_contractions()


def relaxed_accuracy(text: str, answers: Sequence[str]) -> float:
    """Compute ChartQA's relaxed accuracy: a relative error of at most 5 %, else equal texts.

    A text that ends in a percent sign is a hundredth of its number. Case is ignored.
    Source: Masry et al. 2022, ChartQA, section 5.1; pix2struct's metrics.py. Qwen-VL and lmms-eval
    copy its function for one accepted answer.

    >>> relaxed_accuracy("0.44", ["43%"]), relaxed_accuracy("43%", ["43"])
    (1.0, 0.0)
    """
    return float(any(_is_near(text, answer) for answer in answers))


def _is_near(text: str, answer: str) -> bool:
    found, right = _read_percentage(text), _read_percentage(answer)
    if found is None or not right:
        return text.lower() == answer.lower()
    return abs(found - right) / abs(right) <= 0.05


def _read_percentage(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def mathvista(text: str, answer: str, meta: Mapping[str, Any]) -> float:
    """Compute MathVista's accuracy of an extracted answer.

    Among choices the answer is a letter in brackets, a letter alone, or the choice with the least
    edit distance. Integers are truncated, other numbers rounded to the question's precision.
    ``meta`` has the ``choices``, ``answer_type`` and ``precision`` of the question.
    Source: Lu et al. 2024, MathVista; the authors' calculate_score.py.

    >>> mathvista("(b) 4", "4", {"choices": ["3", "4"]})
    1.0
    """
    if choices := meta.get("choices"):
        text = text.strip()
        letters = re.findall(r"\(([a-zA-Z])\)", text)
        letter = letters[0].upper() if letters else text
        index = ord(letter) - ord("A") if len(letter) == 1 else -1
        if not 0 <= index < len(choices):
            distances = [Levenshtein.distance(letter, choice) for choice in choices]
            index = distances.index(min(distances))
        return float(choices[index] == answer)
    try:
        if meta.get("answer_type") == "integer":
            text = str(int(float(text)))
        elif meta.get("answer_type") == "float":
            text = str(round(float(text), int(meta["precision"])))
    except (ValueError, OverflowError):
        return 0.0
    return float(text == answer)


_ROUNDING = 1e-9  # margin at a threshold of IoU, so that floating-point rounding does not decide
_THRESHOLDS = np.arange(0.5, 1.0, 0.05)


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


def _compute_temporal_iou(answer: Sequence[float] | None, example: Example) -> float:
    """Return the IoU of intervals by the operations of Time-R1's script, in their order."""
    if answer is None:
        return 0.0
    (start, end), (first, last) = answer, example.answer
    return (min(last, end) - max(first, start)) / (max(last, end) - min(first, start))


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


def _compute_error_rate(
    answers: Sequence[Any | None], examples: Sequence[Example], words: bool
) -> float:
    golds = [_get_golds(example)[0] for example in examples]
    return error_rate([answer or "" for answer in answers], golds, words)


def _find_hits(answers: Sequence[int | None], examples: Sequence[Example]) -> list[float]:
    golds = [example.answer["options"].index(example.answer["answer"]) for example in examples]
    return [float(answer == gold) for answer, gold in zip(answers, golds, strict=True)]


def mean_over_groups(
    values: Sequence[float], examples: Sequence[Example], *groupings: str
) -> float:
    """Return the mean of means over groups by the first grouping, each the mean of means over
    groups by the next one, down to the mean of values."""
    if not groupings:
        return float(np.mean(values))
    groups: dict[str, tuple[list[float], list[Example]]] = {}
    for value, example in zip(values, examples, strict=True):
        own = groups.setdefault(get_group(groupings[0], example), ([], []))
        own[0].append(value)
        own[1].append(example)
    means = [mean_over_groups(*own, *groupings[1:]) for own in groups.values()]
    return float(np.mean(means))


def _circular(answers: Sequence[int | None], examples: Sequence[Example]) -> float:
    """Compute the share of questions that are right in every rotation of their options."""
    circles: dict[Any, list[float]] = {}
    for answer, example in zip(answers, examples, strict=True):
        options, gold = example.answer["options"], example.answer["answer"]
        hit = answer is not None and options[answer] == gold  # options may have equal texts
        circles.setdefault(example.meta.get("circle", example.id), []).append(float(hit))
    return float(np.mean([min(hits) for hits in circles.values()]))


RULES: dict[str, Callable[[Any, Example], float]] = {
    "ocrbench": lambda a, e: ocrbench(a or "", _get_golds(e), e.meta.get("dataset_name", "")),
    "vqa_accuracy": lambda a, e: vqa_accuracy(a or "", _get_annotations(e)),
    "anls": lambda a, e: anls(a or "", _get_golds(e)),
    "anls_rrc": lambda a, e: anls_rrc(a or "", _get_golds(e)),
    "relaxed_accuracy": lambda a, e: relaxed_accuracy(a or "", _get_golds(e)),
    "mathvista": lambda a, e: mathvista(a or "", e.answer, e.meta),
    "word_recognition": lambda a, e: word_recognition(a or "", _get_golds(e)),
    "accuracy_above_50": lambda a, e: _compute_iou(a, e) > 0.5 + _ROUNDING,
    "accuracy_above_75": lambda a, e: _compute_iou(a, e) > 0.75 + _ROUNDING,
    "accuracy_above_90": lambda a, e: _compute_iou(a, e) > 0.9 + _ROUNDING,
    "mean_accuracy_above": lambda a, e: float(
        np.mean(_compute_iou(a, e) > _THRESHOLDS + _ROUNDING)
    ),
    # Without a margin: rounding decides at a threshold, as in the script.
    "recall_30": lambda a, e: _compute_temporal_iou(a, e) >= 0.3,
    "recall_50": lambda a, e: _compute_temporal_iou(a, e) >= 0.5,
    "recall_70": lambda a, e: _compute_temporal_iou(a, e) >= 0.7,
    "mae": lambda a, e: abs((len(a) if isinstance(a, tuple) else a or 0) - e.answer),
}
"""Rules for single answers, which are None if the output holds none: OCR; charts; IoU > t, whereas
the accuracy of the tasks is IoU ≥ t; and the error of a count, where none counts as 0."""

CORPUS_RULES: dict[str, Callable[[Sequence[Any], Sequence[Example]], float]] = {
    "cv_bench": lambda a, e: mean_over_groups(_find_hits(a, e), e, "type", "source"),
    "blink": lambda a, e: mean_over_groups(_find_hits(a, e), e, "task"),
    "circular": _circular,
    "nms_ap": _nms_ap,
    "rmse_all": lambda a, e: float(np.sqrt(np.mean(np.square(list(map(RULES["mae"], a, e)))))),
    "cer_micro": lambda a, e: _compute_error_rate(a, e, words=False),
    "wer_micro": lambda a, e: _compute_error_rate(a, e, words=True),
}
"""Rules for a dataset."""
