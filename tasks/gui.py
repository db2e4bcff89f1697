"""Screens: where to click, or which action to take, for an instruction?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from vlm_grpo.task import Task, reward
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.drawing import draw_boxes, draw_points
from vlm_grpo.task.parsing import MAX_CHARACTERS, find_json, parse_boxes, parse_points
from vlm_grpo.task.sentences import is_sure
from vlm_grpo.tasks.graders.subjects import is_about
from vlm_grpo.types import Example, ImageRef

_PLACES = ("click", "double_click", "right_click", "long_press")
ACTIONS = {
    **dict.fromkeys(_PLACES, "coordinate"),
    **{"type": "text", "key": "text", "scroll": "direction"},
    **dict.fromkeys(("wait", "back", "home", "done"), ""),
}
"""The argument of each action; empty: it has none."""
DIRECTIONS = ("up", "down", "left", "right")
_FORMS = {"text": ', "text": "…"', "direction": f', "direction": "{"|".join(DIRECTIONS)}"', "": ""}
_TOOLS = ("computer_use", "mobile_use")
# Actions that the words around a place or an action make of it, or that follow it.
_OTHER = re.compile(
    r"(?is)\b(?:then(?! (?:it|you|choose|select|pick)\b)(?!.*[\d|])|scroll at\b"
    r"|double.?click|right.?click|long.?press|drag|hover|swipe)"
)
# "I should not close it; I click the menu at (3, 4)"
_NOT_DONE = re.compile(
    r"I (?:should|must|will|do|would)(?: not|n['’]t) [^.;\d]{1,200}[.;] (?=I click\b)"
)


class Action(NamedTuple):
    """An action.

    Attributes:
        name: a key of ``ACTIONS``.
        point: where to click, in pixels of the last image; None: the action has no place.
        box: the box of the element; None: the answer gives only a point.
        text: the text to type, the key, or the direction.
    """

    name: str
    point: tuple[float, float] | None = None
    box: Box | None = None
    text: str = ""


class GUI(Task):
    """Act on a screenshot, the last image of the example; those before it are the history.

    The gold answer is ``{"boxes": [[x1, y1, x2, y2]]}``, the elements that may be clicked, or an
    action: ``{"action": "long_press", "boxes": …}``, ``{"action": "type", "text": "hello"}``,
    ``{"action": "scroll", "direction": "down"}``, ``{"action": "back"}``.

    An answer is a point ``{"point_2d": [x, y]}`` or a box, which is a click on its center, or an
    action in JSON, ``{"action": "click", "coordinate": [x, y]}``, alone or as the arguments of a
    call of ``computer_use`` or ``mobile_use``, as Qwen2.5-VL writes it (``left_click`` is a click).

    Attributes:
        actions: actions other than a click on a point that the prompt offers.
        box: ask for the box of the element instead of a point.
        spread: standard deviation of the Gaussian rewards, as a share of the sides of a box.
    """

    primary_metric = "correct"
    actions: tuple[str, ...] = ()
    box: bool = False
    spread: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.actions) - ACTIONS.keys():
            raise ValueError(f"actions is {self.actions!r}; give a list of {', '.join(ACTIONS)}")
        if self.box and self.actions:
            raise ValueError("box=true asks for a box and actions for a point: choose one")
        if self.weights.get("coverage") and not self.box:
            raise ValueError("the reward coverage compares boxes: set box=true")
        if not 0 < self.spread < math.inf:
            raise ValueError(f"spread is {self.spread}; it must be above 0")

    def question(self, example: Example) -> str:
        size = self.target_image(example).size
        question = example.question + ("" if example.question.endswith((".", "?", "!")) else ".")
        if not self.actions:
            if self.box:
                return f"{question} Answer with the box to click as {self.frame.describe(size)}."
            return f"{question} Answer with the place to click, {self.frame.describe_point(size)}."
        point = f'"coordinate": {"[y, x]" if self.frame.y_first else "[x, y]"}'
        forms = _FORMS | {"coordinate": f", {point}"}
        names = dict.fromkeys(("click", *self.actions))
        listed = ", ".join(f'{{"action": "{name}"{forms[ACTIONS[name]]}}}' for name in names)
        units = self.frame.describe_units(size)
        return f"{question} Answer with one of {listed}, coordinates {units}."

    def target_image(self, example: Example) -> ImageRef:
        return example.images[-1]

    def parse(self, text: str, example: Example) -> Action | None:
        image = self.target_image(example)
        if len(text) > MAX_CHARACTERS or not is_about(text, example.question):
            return None
        values, parts = find_json(text)
        words = "|".join(parts)
        if denied := _NOT_DONE.match(text):
            return self.parse(text[denied.end() :], example)
        if _OTHER.search(words):
            return None
        if any(isinstance(value, dict) and {"action", "name"} & value.keys() for value in values):
            is_one = all(value == values[0] for value in values) and is_sure(words)
            is_one = is_one and not re.search(r"[{}\[\]\d]|\|.*(?i:then)", words, re.DOTALL)
            return self._read_action(values[0], image) if is_one else None
        units = self.frame.describe_units(image.size)
        points = parse_points(text, units, self.frame.y_first) or ()
        boxes = parse_boxes(text, units, self.frame.y_first) or ()
        found = {box for box, _ in boxes} or {(x, y, x, y) for x, y in points}
        return self._click(found.pop(), image) if len(found) == 1 else None

    def _click(self, place: Box, image: ImageRef, name: str = "click") -> Action:
        """Return a click on the center of a box, or of a point as a box, in the frame's units."""
        x1, y1, x2, y2 = box = self.frame.to_pixels(place, image.size, image.resized_size)
        is_box = place[0] < place[2]
        return Action(name, ((x1 + x2) / 2, (y1 + y2) / 2), box if is_box else None)

    def _read_action(self, value: Any, image: ImageRef) -> Action | None:
        if value.keys() == {"name", "arguments"} and value["name"] in _TOOLS:
            value = value["arguments"]
        name = value.get("action") if isinstance(value, dict) else None
        name = name.lower() if isinstance(name, str) else None
        name = "click" if name == "left_click" else name
        if name not in ("click", *self.actions):
            return None
        key = ACTIONS[name]
        if value.keys() - {"action"} != ({key} if key else set()):
            return None
        given = value.get(key, "")
        if key == "coordinate":
            form = json.dumps({"point" if self.frame.y_first else "point_2d": given})
            points = parse_points(form, y_first=self.frame.y_first) or []
            return self._click((*points[0], *points[0]), image, name) if len(points) == 1 else None
        if key == "direction" and isinstance(given, str):
            given = given.lower() if given.lower() in DIRECTIONS else None
        return Action(name, text=given) if isinstance(given, str) else None

    def write(self, answer: Action, example: Example) -> str:
        image = self.target_image(example)
        if self.box and answer.box is not None:
            return self.frame.write_all([answer.box], image.size, image.resized_size)
        key, place = ACTIONS[answer.name], ""
        if answer.point is not None:
            place = self.frame.write_points([answer.point], image.size, image.resized_size)
            if not self.actions:
                return place
        argument = next(iter(json.loads(place).values())) if place else answer.text
        return json.dumps({"action": answer.name} | ({key: argument} if key else {}))

    def gold_answer(self, example: Example) -> Action:
        gold = example.answer
        name = gold.get("action", "click")
        if name not in _PLACES:
            return Action(name, text=gold.get(ACTIONS[name], ""))
        x1, y1, x2, y2 = box = gold_boxes(gold)[0]
        return Action(name, ((x1 + x2) / 2, (y1 + y2) / 2), box)

    def gold_reward(self, example: Example) -> float:
        """Return what the rounding of coordinates leaves of the Gaussian rewards."""
        answer = self.parse(self.write(self.gold_answer(example), example), example)
        rules = [self.gaussian, self.coverage] if self.box else [self.gaussian]
        return min(0.0 if answer is None else rule(answer, example) for rule in rules)

    def check(self, example: Example) -> None:
        gold = example.answer
        if not example.images:
            raise ValueError("there is no image to act on")
        name = gold.get("action", "click") if isinstance(gold, Mapping) else "click"
        if not isinstance(name, str) or name not in ("click", *self.actions):
            raise ValueError(
                f"the answer has the action {name!r}; add it to the option actions, a list of "
                f"{', '.join(ACTIONS)}"
            )
        if name in _PLACES:
            if not gold_boxes(gold):
                raise ValueError("the answer has no box of an element to act on")
        elif key := ACTIONS[name]:
            value = gold.get(key)
            if not isinstance(value, str) or (key == "direction" and value not in DIRECTIONS):
                known = f"one of {', '.join(DIRECTIONS)}" if key == "direction" else "a string"
                raise ValueError(f"the {key} {value!r} of the action {name} must be {known}")

    def draw(self, image: Image.Image, answer: Action, example: Example, color: str) -> Image.Image:
        image = draw_boxes(image, [answer.box] if answer.box else [], color)
        return draw_points(image, [answer.point] if answer.point else [], color)

    @reward(weight=1.0)
    def correct(self, answer: Action, example: Example) -> float:
        """1 for the right action: a click inside a box, edges included; the text, apart from case
        and white space; the direction."""
        gold = self.gold_answer(example)
        if answer.name != gold.name or answer.point is None:
            same = answer.text.casefold().split() == gold.text.casefold().split()
            return float(answer.name == gold.name and same)
        x, y = answer.point
        return float(any(a <= x <= c and b <= y <= d for a, b, c, d in gold_boxes(example.answer)))

    @reward(weight=0.0, optional=True)
    def action_type(self, answer: Action, example: Example) -> float:
        """1 for the right kind of action, whatever its argument (UI-R1, arXiv:2503.21620)."""
        return float(answer.name == self.gold_answer(example).name)

    @reward(weight=0.0, optional=True)
    def gaussian(self, answer: Action, example: Example) -> float:
        """Gaussian of the click around the center of the nearest box; for other actions, as
        ``correct``.

        Its standard deviations are ``spread`` times the sides of the box (GUI-G², arXiv:2507.15846,
        Gaussian point reward).
        """
        if answer.point is None or answer.name != self.gold_answer(example).name:
            return self.correct(answer, example)
        return self._overlap((*answer.point, *answer.point), example)

    @reward(weight=0.0, optional=True)
    def coverage(self, answer: Action, example: Example) -> float:
        """Bhattacharyya coefficient of the Gaussians of the two boxes; 0 for a point.

        Both have standard deviations of ``spread`` times the sides of their box (GUI-G²,
        arXiv:2507.15846, Gaussian coverage reward).
        """
        if answer.box is None or answer.name != self.gold_answer(example).name:
            return 0.0
        return self._overlap(answer.box, example)

    def _overlap(self, place: Box, example: Example) -> float:
        return max(gaussian_overlap(place, box, self.spread) for box in gold_boxes(example.answer))


def gaussian_overlap(place: Box, gold: Box, spread: float) -> float:
    """Compute the Bhattacharyya coefficient of the Gaussians of two boxes, in [0, 1].

    A box stands for the normal distribution around its center whose standard deviations are
    ``spread`` times its sides; a box without area stands for a point, and the result is the value
    there of the other's Gaussian with maximum 1. Source: GUI-G², arXiv:2507.15846, the coverage
    and the point reward.

    Per axis, with centers d apart, exp(−d² / 4(s² + t²)) · √(2st / (s² + t²)), or exp(−d² / 2t²).

    >>> round(gaussian_overlap((0, 0, 2, 2), (0, 0, 1, 1), 0.5), 3)
    0.724
    """
    result = 1.0
    for low, high in ((0, 2), (1, 3)):
        d = (place[low] + place[high] - gold[low] - gold[high]) / 2
        s, t = spread * (place[high] - place[low]), spread * (gold[high] - gold[low])
        if s:
            squares = s * s + t * t
            result *= math.exp(-d * d / (4 * squares)) * math.sqrt(2 * s * t / squares)
        else:
            result *= math.exp(-d * d / (2 * t * t))
    return result
