"""Keypoints: named points of one object, scored by COCO's object keypoint similarity."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.drawing import draw_points
from vlm_grpo.task.parsing import MAX_CHARACTERS, find_json, parse_points
from vlm_grpo.task.sentences import is_sure, unwrap
from vlm_grpo.tasks.graders.subjects import CATEGORY, forget, is_about
from vlm_grpo.types import Example

Point = tuple[float, float]
Points = tuple[tuple[str, Point], ...]  # each name once
SIGMAS = {
    **{"nose": 0.026, "left eye": 0.025, "right eye": 0.025, "left ear": 0.035, "right ear": 0.035},
    **{f"{side} shoulder": 0.079 for side in ("left", "right")},
    **{f"{side} elbow": 0.072 for side in ("left", "right")},
    **{f"{side} wrist": 0.062 for side in ("left", "right")},
    **{f"{side} hip": 0.107 for side in ("left", "right")},
    **{f"{side} knee": 0.087 for side in ("left", "right")},
    **{f"{side} ankle": 0.089 for side in ("left", "right")},
}
"""COCO's standard deviations of annotators for a person's keypoints, as shares of √area."""
_KEYS = ("point_2d", "point")  # with x first, with y first
_LABELS = ("label", "name", "keypoint")
_PLACE = (
    r"\*{0,3}(?: of it)?(?: ?[:=]| is| at| located| \|){0,4}\*{0,3} ?[\[(|] ?"
    r"(-?\d{1,6}(?:\.\d{1,3})?) ?[,|] ?(-?\d{1,6}(?:\.\d{1,3})?) ?[\])|]"
)
_NAMED_SIDES = re.compile(
    r"\(?\bx ?[=:] ?(-?\d{1,6}(?:\.\d{1,3})?) ?,? ?(?:and )?y ?[=:] ?(-?\d{1,6}(?:\.\d{1,3})?)\)?"
)
_UNSEEN = (
    r"\*{0,3}(?: ?:| is){0,2}\*{0,3} (?:not (?:visible|seen|shown|in (?:view|the image))|occluded"
    r"|hidden|cannot be seen|n/a)\b"
)
_POINTS_OF = re.compile(rf"points (?:of|for) (?:the|an?) (?:[\w-]+ )?{CATEGORY}", re.IGNORECASE)


class Keypoints(Task):
    """Locate the named points of the object that the question means.

    The gold answer is ``{"points": {"nose": [x, y], …}, "area": 5000}`` in original pixels, with
    the points that are labeled and the area of the object, or its ``box`` in place of the area;
    ``names`` has all points to ask for, by default the labeled ones. An answer names each point at
    most once; it may leave points out, and points that have no label do not count, as in COCO.

    Attributes:
        sigma: standard deviation, as a share of √area, of points that are none of COCO's.
        reach: distance below which ``pck`` counts a point, as a share of √area.
    """

    primary_metric = "oks"
    sigma: float = 0.07
    reach: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sigma > 0 and self.reach > 0):
            raise ValueError("sigma and reach must be positive")

    def question(self, example: Example) -> str:
        key, place = (_KEYS[1], "[y, x]") if self.frame.y_first else (_KEYS[0], "[x, y]")
        units = self.frame.describe_units(example.images[0].size)
        return (
            f"Locate these points of {example.question}: {', '.join(_list_names(example))}. Answer "
            f'with a list of {{"{key}": {place}, "label": NAME}} {units}; leave out what cannot be '
            "seen."
        )

    def parse(self, text: str, example: Example) -> Points | None:
        if len(text) > MAX_CHARACTERS or not is_about(text, example.question, finds=True):
            return None
        other = _POINTS_OF.search(text)
        if other is not None and other[1].lower() not in example.question.lower():
            return None
        asked, y_first = _list_names(example), self.frame.y_first
        text = unwrap(forget(text, example.question), lead=False)
        unseen = re.compile(rf"\*{{0,3}}\b({_join_names(asked)}){_UNSEEN}", re.IGNORECASE)
        hidden = {_normalize(name) for name in unseen.findall(text)}
        values, parts = find_json(_write_named(unseen.sub("", text), asked, y_first))
        if len(values) > 1 and not all(isinstance(value, dict) for value in values):
            return None
        named: list[tuple[str, Any]] = []
        for value in values:
            if (found := _list_named(value, _KEYS[y_first], {*asked})) is None:
                return None
            named += found
        if not values or len({name for name, _ in named}) < len(named):
            return None
        if not {name for name, _ in named} <= {*asked} - hidden or not is_sure("|".join(parts)):
            return None
        size, seen = example.images[0].size, example.images[0].resized_size
        # Points are read by the rules of all tasks, among the same words.
        alone = json.dumps([{_KEYS[y_first]: point} for _, point in named])
        alone = f"{parts[0]}{alone}{' '.join(parts[1:])}"
        points = parse_points(alone, self.frame.describe_units(size), y_first)
        if points is None or len(points) != len(named):
            return None
        return tuple(
            (name, self.frame.to_pixels((*point, *point), size, seen)[:2])
            for (name, _), point in zip(named, points, strict=True)
        )

    def write(self, answer: Points, example: Example) -> str:
        image = example.images[0]
        found = []
        for name, point in answer:
            text = self.frame.write_points([point], image.size, image.resized_size)
            found.append({**json.loads(text), "label": name})
        return json.dumps(found)

    def gold_answer(self, example: Example) -> Points:
        points = example.answer["points"].items()
        return tuple((_normalize(name), (float(x), float(y))) for name, (x, y) in points)

    def gold_reward(self, example: Example) -> float:
        """Return the similarity of points moved by half a unit along each axis, as by rounding."""
        image, half = example.images[0], 0.5 * 10**-self.frame.decimals
        moved = self.frame.to_pixels((half, half, half, half), image.size, image.resized_size)[:2]
        gold = self.gold_answer(example)
        return self._compare(
            tuple((n, (x + moved[0], y + moved[1])) for n, (x, y) in gold), example
        )

    def check(self, example: Example) -> None:
        answer = example.answer
        points = answer.get("points") if isinstance(answer, Mapping) else None
        if not example.images:
            raise ValueError("there is no image to locate points in")
        if not isinstance(points, Mapping) or not points:
            raise ValueError(f'the answer {answer!r:.80} must have points: {{"nose": [x, y]}}')
        for name, point in points.items():
            is_pair = isinstance(point, list | tuple) and len(point) == 2
            if not is_pair or not all(_is_number(value) for value in point):
                raise ValueError(f"point {name} {point!r:.80} must be two numbers, x and y")
        names = _list_names(example)
        if len({*names}) < len(names) or not {*map(_normalize, points)} <= {*names}:
            raise ValueError("names must have each point once, the labeled ones among them")
        area = _find_area(example)
        if not (_is_number(area) and area > 0):
            raise ValueError("the answer must have a positive area, or a box")

    def draw(self, image: Image.Image, answer: Points, example: Example, color: str) -> Image.Image:
        drawn = draw_points(image, [point for _, point in answer], color)
        pen = ImageDraw.Draw(drawn)
        for name, (x, y) in answer:
            pen.text((x + 3, y + 3), name, fill=color)
        return drawn

    @reward(weight=1.0)
    def oks(self, answer: Points, example: Example) -> float:
        """Object keypoint similarity: the mean over labeled points of exp(−d² / (8 σ² · area)); a
        point that is left out counts as 0 (cocodataset.org, keypoints-eval)."""
        return self._compare(answer, example)

    @metric()
    def pck(self, answer: Points, example: Example) -> float:
        """Share of labeled points that are nearer than ``reach`` · √area."""
        found, limit = dict(answer), self.reach * math.sqrt(_find_area(example))
        gold = self.gold_answer(example)
        return sum(n in found and math.dist(found[n], p) < limit for n, p in gold) / len(gold)

    @metric()
    def oks_50(self, answer: Points, example: Example) -> float:
        """1 if the similarity is at least 0.5, else 0."""
        return float(self._compare(answer, example) >= 0.5)

    @metric()
    def oks_75(self, answer: Points, example: Example) -> float:
        """1 if the similarity is at least 0.75, else 0."""
        return float(self._compare(answer, example) >= 0.75)

    def _compare(self, answer: Points, example: Example) -> float:
        found, area, values = dict(answer), _find_area(example), []
        for name, gold in self.gold_answer(example):
            variance = (2 * SIGMAS.get(name, self.sigma)) ** 2
            distance = math.dist(found[name], gold) if name in found else math.inf
            # The added constant is that of pycocotools.
            values.append(math.exp(-(distance**2) / variance / (area + np.spacing(1)) / 2))
        return float(np.mean(values))


def _write_named(text: str, names: Sequence[str], y_first: bool) -> str:
    """Return a text with its points after names ("nose: (3, 4)") as JSON."""
    if '"' in text:
        return text
    text = _NAMED_SIDES.sub(r"(\2, \1)" if y_first else r"(\1, \2)", text)

    def write(found: re.Match[str]) -> str:
        point = [float(found[2]), float(found[3])]
        return json.dumps({"label": found[1], _KEYS[y_first]: point})

    text = re.sub(rf"\*{{0,3}}\b({_join_names(names)}){_PLACE}", write, text, flags=re.IGNORECASE)
    return re.sub(r"(?m)^[ \t]{0,8}(?:[-*•]|\d{1,2}[.)]) (?=\{)", "", text)


def _join_names(names: Sequence[str]) -> str:
    """Return a pattern of any of the names, the longest first."""
    longest = sorted(names, key=len, reverse=True)
    return "|".join(re.escape(name).replace(r"\ ", "[ _-]") for name in longest)


def _list_named(value: Any, key: str, asked: Collection[str]) -> list[tuple[str, Any]] | None:
    """Return the names and points of a list of points with labels, or of an object of points by
    name; those that are null cannot be seen."""
    if isinstance(value, dict) and len(value) == 1:  # {"keypoints": […]}
        (name, inner), *_ = value.items()
        if _normalize(name) not in asked and isinstance(inner, list | dict):
            value = inner
    if isinstance(value, dict) and not {key, "point"}.isdisjoint(value):
        value = [value]
    found: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, dict) and [*item] == [key]:
                item = item[key]
            if isinstance(item, dict) and [*item] == ["x", "y"]:
                item = [item["x"], item["y"]][:: -1 if key == _KEYS[True] else 1]
            if isinstance(item, list):
                found.append((_normalize(name), item))
            elif item is not None:
                return None
        return found
    for item in value:
        if not isinstance(item, dict):
            return None
        labels = [label for label in _LABELS if label in item]
        points = [name for name in {key, "point"} if name in item]
        if len(labels) != 1 or len(points) != 1 or not isinstance(item[labels[0]], str):
            return None
        # A further text or list is another answer, and false denies this one.
        others = [x for name, x in item.items() if name not in (*labels, *points)]
        if any(x is False or isinstance(x, str | list | dict) for x in others):
            return None
        point = item[points[0]]
        if isinstance(point, list):
            found.append((_normalize(item[labels[0]]), point))
        elif point is not None:
            return None
    return found


def _list_names(example: Example) -> list[str]:
    answer = example.answer
    return [_normalize(name) for name in answer.get("names") or answer["points"]]


def _find_area(example: Example) -> Any:
    answer = example.answer
    if answer.get("area") is not None or "box" not in answer:
        return answer.get("area")
    x1, y1, x2, y2 = answer["box"]
    return (x2 - x1) * (y2 - y1)


def _normalize(name: str) -> str:
    return " ".join(re.sub("[_-]", " ", str(name).casefold()).split())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
