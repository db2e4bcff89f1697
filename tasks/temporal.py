"""Temporal grounding: when in the video does the described event happen?"""

from __future__ import annotations

import re
from typing import Any

from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.drawing import draw_boxes
from vlm_grpo.task.sentences import Candidate, choose, fold, has_number
from vlm_grpo.tasks.graders.subjects import is_about, is_before
from vlm_grpo.types import Example, VideoRef

Interval = tuple[float, float]  #: Start and end in seconds
_TOLERANCE = 1e-9  # For floating-point rounding of an IoU that equals a threshold
_MAX_CHARACTERS = 1_000
_SHORTEST = 0.01
"""Least length of a gold interval in seconds: answers are written with two decimals."""
_UNIT = r"(?:[- ]?(?:s|secs?|seconds?|segundos?|sekunden?|secondes?)\b(?: mark)?| ?秒)?"
_SECONDS = rf"(\d{{1,6}}(?:\.\d{{1,6}})?){_UNIT}"
# What may stand between start and end, among it a word or sign that joins them, and what after.
_TO = "to|a|à|bis|until|till|through|and|und|y|ends?|ended|finish(?:es|ed)?|stops?"
_JOIN = (
    rf"(?=[^\d]{{0,40}}(?:\b(?:{_TO})|[-–—→,到至]))(?:[\s,;:=\"'*_(){{}}→>–—到至-]"
    rf"|\b(?:{_TO}|up|it|at|in|the|then|event|time|second|t|ending|end_?time)\b|\.(?= )){{1,12}}"
)
_END = (
    r"(?![.,:]?\d|[\w%°]| ?(?!(?:in|into|of|as|when|while|during|on|where|is|inclusive|the|he|she"
    r"|it|they)\b)[\w%°])"
)
_BEFORE = r"(?<![^\W从自])(?<![.,:+-])(?:between |zwischen |entre )?"
_INTERVAL = re.compile(_BEFORE + _SECONDS + _JOIN + _SECONDS + _END)
# Other units, what a range is of if not of time, and a part of the video that is not there.
_NO_TIME = re.compile(
    r"\b(?:min(?:ute)?s?|h(?:ou)?rs?|ms|milliseconds?|frames?|percent)\b|%"
    r"|\b(?:(?:page|chapter|paragraph|section|line|row|column|slide|level|step|item|scene|shot"
    r"|episode|verse|version)s?|(?:score|price|value|count) \w+) (?:from )?\|"
    r"|\b(?:clip|video|footage|film|recording|segment|event)\b(?:(?! (?:at|until) \|)[^|,.]){0,20}"
    r"\b(?:cut|missing|removed|deleted|skipped|trimmed)\b[^|]*\|"
    r"|\|[^|,.]{0,9}\b(?:is|was|are|were) (?:cut|missing|removed|deleted|skipped|trimmed)\b"
)


class Temporal(Task):
    """State when an event happens; answers and gold answers are ``[start, end]`` in seconds."""

    primary_metric = "recall_50"

    def question(self, example: Example) -> str:
        return (
            f"When does this happen in the video: {example.question}? Answer with its start and "
            "end in seconds, as START to END."
        )

    def parse(self, text: str, example: Example) -> Interval | None:
        """Return the only interval of a text without other numbers, or None.

        Accepted forms are "2.5 to 7", with units, other words around it and other words or a dash
        between the numbers, ``[2.5, 7]``, and ``{"start": 2.5, "end": 7}``.
        """
        if len(text) > _MAX_CHARACTERS:
            return None
        text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", " ".join(fold(text).lower().split()))
        rest = _INTERVAL.sub("|", text)
        intervals = (
            Candidate(found.start(), found.end(), (float(found[1]), float(found[2])))
            for found in _INTERVAL.finditer(text)
        )
        interval = choose(text, list(intervals))
        if interval is None or has_number(rest) or _NO_TIME.search(rest):
            return None
        if not is_about(text, example.question) or is_before(text, example.question):
            return None
        return interval if interval[0] < interval[1] else None

    def write(self, answer: Interval, example: Example) -> str:
        start, end = (f"{seconds:.2f}".rstrip("0").rstrip(".") for seconds in answer)
        return f"{start} to {end}"

    def gold_answer(self, example: Example) -> Interval:
        start, end = example.answer
        return float(start), float(end)

    def gold_reward(self, example: Example) -> float:
        written = self.parse(self.write(self.gold_answer(example), example), example)
        return 0.0 if written is None else self.bounded(written, example)

    def check(self, example: Example) -> None:
        video = self.target_image(example)
        answer: Any = example.answer
        is_pair = isinstance(answer, list | tuple) and len(answer) == 2
        if not is_pair or not all(type(value) in (int, float) for value in answer):
            raise ValueError(f"the answer must be [start, end] in seconds, not {answer!r}")
        start, end = answer
        if not 0 <= start <= end - _SHORTEST or start >= video.seconds:
            raise ValueError(
                f"the answer {answer!r} must start within the video of {video.seconds:.1f} seconds "
                f"and end at least {_SHORTEST} seconds later"
            )

    def target_image(self, example: Example) -> VideoRef:
        """Return the first video of an example.

        Raises:
            ValueError: it has none.
        """
        for image in example.images:
            if isinstance(image, VideoRef):
                return image
        raise ValueError("there is no video in which anything could happen")

    def draw(
        self, image: Image.Image, answer: Interval, example: Example, color: str
    ) -> Image.Image:
        """Return a copy of the strip of frames with the interval as a box over them."""
        scale = image.width / self.target_image(example).seconds
        return draw_boxes(image, [(answer[0] * scale, 0, answer[1] * scale, image.height)], color)

    @reward(weight=1.0)
    def iou(self, answer: Interval, example: Example) -> float:
        """Temporal IoU: the length of the intersection over that of the union."""
        (start, end), (first, last) = answer, self.gold_answer(example)
        return max(0.0, min(end, last) - max(start, first)) / (max(end, last) - min(start, first))

    @reward(weight=0.0, optional=True)
    def bounded(self, answer: Interval, example: Example) -> float:
        """IoU · (1 − |Δstart| / T) · (1 − |Δend| / T) in a video of T seconds (Time-R1,
        arXiv:2503.13377), at least 0; it tells apart answers of equal IoU by their bounds."""
        seconds, value = self.target_image(example).seconds, self.iou(answer, example)
        for stated, gold in zip(answer, self.gold_answer(example), strict=True):
            value *= max(0.0, 1.0 - abs(stated - gold) / seconds)
        return value

    @metric()
    def recall_30(self, answer: Interval, example: Example) -> float:
        """1 if the IoU is at least 0.3 (R1@0.3)."""
        return float(self.iou(answer, example) >= 0.3 - _TOLERANCE)

    @metric()
    def recall_50(self, answer: Interval, example: Example) -> float:
        """1 if the IoU is at least 0.5 (R1@0.5)."""
        return float(self.iou(answer, example) >= 0.5 - _TOLERANCE)

    @metric()
    def recall_70(self, answer: Interval, example: Example) -> float:
        """1 if the IoU is at least 0.7 (R1@0.7)."""
        return float(self.iou(answer, example) >= 0.7 - _TOLERANCE)
