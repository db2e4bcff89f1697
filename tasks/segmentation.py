"""Segmentation: a box and a point for each object, from which SAM 2 makes masks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.drawing import draw_boxes, draw_points
from vlm_grpo.task.parsing import MAX_CHARACTERS, find_json, parse_boxes, parse_points
from vlm_grpo.task.scores import iou_matrix, matched_mean
from vlm_grpo.task.sentences import is_sure, unwrap
from vlm_grpo.tasks.graders.masks import Point, decode_mask, find_center, segment
from vlm_grpo.tasks.graders.subjects import forget, is_about
from vlm_grpo.types import Example, ImageRef, LabeledBoxes

Objects = tuple[tuple[Box, Point], ...]
_BOX, _POINT = ("bbox_2d", "box_2d"), ("point_2d", "point")  # with x first, with y first
# All keys of each that are read; with y first, the prompt's alone.
_BOXES, _POINTS = (("bbox_2d", "bbox", "box"), ("box_2d",)), (("point_2d", "point"), ("point",))

_NUMBER = r"-?\d{1,6}(?:\.\d{1,3})?"
_PAIR = re.compile(
    rf"[\[(] ?({_NUMBER}(?: ?, ?{_NUMBER}){{3}}) ?[\])]"
    r"(?:[\s,;:|*]|\b(?:with|and|an?|the|its|inner|point|inside|it|is|at)\b){1,20}"
    rf"[\[(] ?({_NUMBER} ?, ?{_NUMBER}) ?[\])]",
    re.IGNORECASE,
)


class Segmentation(Task):
    """Find every object that the question means, each with a box and a point inside it.

    The gold answer is ``{"boxes": […], "points": [[x, y], …], "masks": […]}`` in original pixels;
    the points, by default the centers of the masks or of the boxes, and the masks (COCO's
    run-length encoding or polygons), one for each box or one of all objects, may be left out.
    ``[]`` states that there is nothing. Answers are JSON in every frame.

    Attributes:
        canvas: side of the square to which the image is scaled for the thresholds of the reward;
            VisionReasoner's are pixels of 840 × 840. None: pixels of the original image.
        iou: a box is right above this IoU.
        box_distance: and its edges are exact below this mean distance in pixels.
        point_distance: a point is right below this distance from the gold point, in its own box.
        segmenter: a SAM 2 of transformers (``facebook/sam2.1-hiera-large``), which makes masks of
            the answers; None: masks are not compared.
        max_objects: largest number of objects in a valid answer.
    """

    primary_metric = "found"
    canvas: int | None = None
    iou: float = 0.5
    box_distance: float = 10.0
    point_distance: float = 30.0
    segmenter: str | None = None
    max_objects: int = 120

    def __post_init__(self) -> None:
        super().__post_init__()
        if "mask_iou" in self.weights and self.segmenter is None:
            raise ValueError("the reward mask_iou needs segmenter, a SAM 2 of transformers")
        if self.canvas is not None and self.canvas < 1:
            raise ValueError(f"canvas is {self.canvas}; it must be at least 1")

    def question(self, example: Example) -> str:
        units = self.frame.describe_units(example.images[0].size)
        form = '{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}'
        if self.frame.y_first:
            form = '{"box_2d": [y1, x1, y2, x2], "point": [y, x]}'
        return (
            f"Find all objects that match: {example.question}. Answer with a list of their boxes, "
            f"each with a point inside the object: [{form}] {units}; [] if there is none."
        )

    def parse(self, text: str, example: Example) -> Objects | None:
        # What is there in place of nothing ("[]. The animals are horses.") is another thing.
        lead = re.split(r"\[\s*\](?=\.|\s*(?:\n|\Z))", text[:MAX_CHARACTERS])[0]
        if len(text) > MAX_CHARACTERS or not is_about(lead, example.question, finds=True):
            return None
        text = unwrap(forget(text, example.question), lead=False)
        if "{" not in text and not self.frame.y_first:  # a box and its point in a sentence
            text = _PAIR.sub(rf'{{"{_BOX[0]}": [\1], "{_POINT[0]}": [\2]}}', text)
        values, parts = find_json(text)
        # Boxes and points are read by their own rules, among the same words.
        boxes_alone, points_alone = parts[0], parts[0]
        for value, words in zip(values, parts[1:], strict=True):
            if isinstance(value, dict) and len(value) == 1:  # {"objects": […]}
                (value,) = value.values()
            alone = self._split(value, example.question)
            if alone is None:
                return None
            boxes_alone += json.dumps(alone[0]) + words
            points_alone += json.dumps(alone[1]) + words
        size, frame = example.images[0].size, self.frame
        boxes = parse_boxes(boxes_alone, frame.describe_units(size), frame.y_first)
        points = parse_points(points_alone, frame.describe_units(size), frame.y_first)
        if boxes is None or points is None or not len(boxes) == len(points) <= self.max_objects:
            return None
        seen = example.images[0].resized_size
        return tuple(
            (frame.to_pixels(box, size, seen), frame.to_pixels((*point, *point), size, seen)[:2])
            for (box, _), point in zip(boxes, points, strict=True)
        )

    def _split(self, value: Any, question: str) -> tuple[Any, Any] | None:
        """Return the boxes and the points alone of an object, or of a list of objects."""
        if isinstance(value, list):
            if len(value) > self.max_objects:
                return None
            pairs = [self._split(item, question) for item in value if isinstance(item, dict)]
            found = [pair for pair in pairs if pair is not None]
            if len(found) < len(value):
                return None
            return [box for box, _ in found], [point for _, point in found]
        if not isinstance(value, dict):
            return None
        y_first = self.frame.y_first
        keys = [[key for key in names[y_first] if key in value] for names in (_BOXES, _POINTS)]
        if [len(own) for own in keys] != [1, 1]:
            return None
        (box_key,), (point_key,) = keys
        for key, item in value.items():
            # A further list is another answer, false denies this one, and so may a label.
            if key not in (box_key, point_key) and (item is False or isinstance(item, list | dict)):
                return None
            if isinstance(item, str) and not _names(re.sub(r"\d+", "", item), question):
                return None
        return {_BOX[y_first]: value[box_key]}, {_POINT[y_first]: value[point_key]}

    def write(self, answer: Objects, example: Example) -> str:
        image, y_first = example.images[0], self.frame.y_first
        key, items, unit = _POINT[y_first], [], 10**-self.frame.decimals
        for (x1, y1, x2, y2), point in answer:
            text = self.frame.write_points(
                [(x1, y1), (x2, y2), point], image.size, image.resized_size
            )
            start, end, inner = (corner[key] for corner in json.loads(text))
            end = [max(e, round(s + unit, 6)) for s, e in zip(start, end, strict=True)]
            items.append({_BOX[y_first]: [*start, *end], key: inner})
        return json.dumps(items)

    def gold_answer(self, example: Example) -> Objects:
        boxes, answer = gold_boxes(example.answer), example.answer
        points = answer.get("points")
        if points is None and len(answer.get("masks") or ()) == len(boxes):
            size = example.images[0].size
            points = [find_center(decode_mask(mask, size)) for mask in answer.get("masks") or ()]
        if points is None:
            points = [((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in boxes]
        return tuple(zip(boxes, ((float(x), float(y)) for x, y in points), strict=True))

    def gold_reward(self, example: Example) -> float:
        """Return what rounding to the frame's units leaves of the reward for certain."""
        image, frame = example.images[0], self.frame
        step = 10**-frame.decimals * (1 if frame.max_coordinate is None else 2)
        x, y = frame.to_pixels((step, step, step, step), image.size, image.resized_size)[:2]
        scale = [1.0 if self.canvas is None else self.canvas / side for side in image.size]
        moved = max(x * scale[0], y * scale[1])  # half of it at most, but for thin boxes
        sure = []
        for box, point in self.gold_answer(example):
            overlap = frame.least_iou(box, image.size, image.resized_size)
            margins = point[0] - box[0], box[2] - point[0], point[1] - box[1], box[3] - point[1]
            is_inside = min(margins[:2]) >= x and min(margins[2:]) >= y
            sure += [overlap > self.iou, moved < self.box_distance]
            sure.append(is_inside and 2 * moved < self.point_distance)
        return sum(sure) / len(sure) if sure else 1.0

    def ask_about(self, objects: LabeledBoxes) -> Iterator[tuple[str, Any]]:
        pairs = [*zip(objects.labels, objects.masks, strict=False)]  # there may be no masks
        for label, boxes in objects.group_by_label().items():
            masks = [mask for own, mask in pairs if own == label]
            has_masks = masks and None not in masks
            yield label, {"boxes": boxes, **({"masks": masks} if has_masks else {})}

    def check(self, example: Example) -> None:
        boxes, answer = gold_boxes(example.answer), example.answer
        if not example.images:
            raise ValueError("there is no image to segment")
        if len(boxes) > self.max_objects:
            raise ValueError(f"there are {len(boxes)} boxes, more than max_objects")
        points, masks = answer.get("points"), answer.get("masks")
        if points is not None:
            if not isinstance(points, list | tuple) or len(points) != len(boxes):
                raise ValueError(f"the answer must have a point for each of its {len(boxes)} boxes")
            for point in points:
                is_pair = isinstance(point, list | tuple) and len(point) == 2
                if not is_pair or not all(type(v) in (int, float) for v in point):
                    raise ValueError(f"point {point!r:.80} must be two numbers, x and y")
        if masks is None and boxes and self.segmenter is not None:
            raise ValueError("the answer has no masks, with which those of segmenter are compared")
        if masks is not None:
            if not isinstance(masks, list | tuple) or len(masks) not in (1, len(boxes)):
                raise ValueError("the answer must have a mask for each box, or one of all objects")
            for mask in masks:
                decode_mask(mask, example.images[0].size)

    def draw(
        self, image: Image.Image, answer: Objects, example: Example, color: str
    ) -> Image.Image:
        drawn = draw_boxes(image, [box for box, _ in answer], color)
        return draw_points(drawn, [point for _, point in answer], color)

    @reward(weight=1.0)
    def located(self, answer: Objects, example: Example) -> float:
        """A third each for a right box, exact edges and a right point, of objects matched one to
        one; missing and extra objects count as 0.

        VisionReasoner (arXiv:2505.12081, vision_reasoner.py), whose IoU counts one pixel more along
        each side, and which pays nothing where there is nothing to find.
        """
        gold = self.gold_answer(example)
        shape, size = (len(answer), len(gold)), example.images[0].size
        x, y = (1.0, 1.0) if self.canvas is None else (self.canvas / s for s in size)
        mine, right = (
            np.array([b for b, _ in o]).reshape(-1, 4) * (x, y, x, y) for o in (answer, gold)
        )
        dots, others = (np.array([p for _, p in o]).reshape(-1, 2) * (x, y) for o in (answer, gold))
        overlaps = iou_matrix([b for b, _ in answer], [b for b, _ in gold]).reshape(shape)
        edges = np.abs(mine[:, None] - right[None]).mean(axis=2)
        apart = np.sqrt(((dots[:, None] - others[None]) ** 2).sum(axis=2))
        inside = np.all((dots >= mine[:, :2]) & (dots <= mine[:, 2:]), axis=1)
        hits = [overlaps > self.iou, edges < self.box_distance]
        hits.append((apart < self.point_distance) & inside.reshape(-1, 1))
        return matched_mean(np.sum(hits, axis=0) / 3)

    @metric()
    def found(self, answer: Objects, example: Example) -> float:
        """Share of objects matched one to one whose box is right and holds its point, which lies in
        the gold box; missing and extra ones count as 0."""
        gold = self.gold_answer(example)
        overlaps = iou_matrix([b for b, _ in answer], [b for b, _ in gold])
        holds = [
            [_contains(own, point) and _contains(other, point) for other, _ in gold]
            for own, point in answer
        ]
        hits = (overlaps > self.iou) & np.array(holds, bool).reshape(overlaps.shape)
        return matched_mean(hits.astype(float))

    @metric()
    def box_iou(self, answer: Objects, example: Example) -> float:
        """Mean IoU of boxes matched one to one; missing and extra ones count as 0."""
        gold = self.gold_answer(example)
        return matched_mean(iou_matrix([b for b, _ in answer], [b for b, _ in gold]))

    @metric()
    def count_exact(self, answer: Objects, example: Example) -> float:
        """1 if there are as many objects as in the gold answer, else 0."""
        return float(len(answer) == len(gold_boxes(example.answer)))

    @reward(weight=0.0, optional=True)
    def mask_iou(self, answer: Objects, example: Example) -> float:
        """IoU of the union of the masks that ``segmenter`` makes of the answer; 1 where there is
        nothing to find and nothing is found."""
        inner, union = self._compare_masks(answer, example)
        return inner / union if union else 1.0

    def _compare_masks(self, answer: Objects | None, example: Example) -> tuple[int, int]:
        """Return the areas of the intersection and of the union with the gold mask, in pixels."""
        gold = _get_gold_mask(example)
        mine = np.zeros_like(gold)
        if answer and self.segmenter is not None:
            mine = _segment(self.segmenter, example.images[0], answer)
        ignored = example.meta.get("ignored_mask")
        if ignored is not None:
            kept = ~decode_mask(ignored, example.images[0].size)
            mine, gold = mine & kept, gold & kept
        return int((mine & gold).sum()), int((mine | gold).sum())

    def corpus_metrics(
        self, answers: Sequence[Objects | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return, with a ``segmenter``, ``mask_giou``, the mean IoU, and ``mask_ciou``, the sum of
        the intersections divided by that of the unions (LISA, arXiv:2308.00692, section 4.1).

        Where there is nothing to find, the IoU is 1 if nothing is found, else 0, and ``n_acc`` is
        the share of the former; ``t_acc`` is the share of the other examples in which something is
        found (gRefCOCO, arXiv:2306.00968; ReLA's refer_evaluation.py). A missing answer finds
        nothing, but it does not state that there is nothing.
        """
        if self.segmenter is None or not examples:
            return {}
        inner, union, ious = 0, 0, []
        stated: dict[bool, list[bool]] = {True: [], False: []}
        for answer, example in zip(answers, examples, strict=True):
            has_target = bool(gold_boxes(example.answer))
            own_inner, own_union = self._compare_masks(answer, example)
            none = answer == ()
            stated[has_target].append(none)
            inner, union = inner + own_inner, union + own_union
            # Where all of the target is left out of the comparison, LISA counts 1.
            found = own_inner / own_union if own_union else 1.0
            ious.append(found if has_target else float(none))
        values = {"mask_giou": float(np.mean(ious)), "mask_ciou": inner / union if union else 1.0}
        if stated[False]:
            values["n_acc"] = float(np.mean(stated[False]))
            values |= {"t_acc": 1 - float(np.mean(stated[True]))} if stated[True] else {}
        return values


def _contains(box: Box, point: Point) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


@lru_cache(256)  # many objects have one label
def _names(label: str, question: str) -> bool:
    """Return whether a label neither denies what the question asks for nor names another thing."""
    label = forget(label, question)
    return is_sure(f"{label}: |") and is_about(f"the {label}:", question, finds=True)


def _get_gold_mask(example: Example) -> np.ndarray:
    size = example.images[0].size
    found = np.zeros(size[::-1], bool)
    for mask in example.answer.get("masks") or ():
        found |= decode_mask(mask, size)
    return found


@lru_cache(256)  # the reward and the metrics of the dataset compare the same masks
def _segment(name: str, image: ImageRef, answer: Objects) -> np.ndarray:
    return segment(name, image.load(), [box for box, _ in answer], [point for _, point in answer])
