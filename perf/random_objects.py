"""Random outputs near masks, estimates, options and orders, many of them malformed, with gold
answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from official_scripts import SIDE
from random_outputs import draw_box, draw_box_near, make_example

from vlm_grpo.tasks.graders.masks import encode_mask
from vlm_grpo.types import Example

Pair = tuple[list[float], list[float]]


def fill(boxes: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the union of boxes as a mask of the image of every example."""
    mask = np.zeros((SIDE, SIDE), bool)
    for box in boxes:
        x1, y1, x2, y2 = (max(0, round(edge)) for edge in box)
        mask[y1:y2, x1:x2] = True
    return mask


def draw_objects(rng: random.Random, least: int = 1) -> tuple[Example, str]:
    """Draw ``least`` to four objects, their mask, a region to ignore in some of the examples, and
    an output."""
    boxes = [[float(v) for v in draw_box(rng)] for _ in range(rng.randint(least, 4))]
    points = [[(x1 + x2) / 2, (y1 + y2) / 2] for x1, y1, x2, y2 in boxes]
    gold: dict[str, Any] = {"boxes": boxes, "points": points}
    if boxes:
        gold["masks"] = [encode_mask(fill(boxes))]
    meta: dict[str, Any] = (
        {"ignored_mask": encode_mask(fill([draw_box(rng)]))} if rng.random() < 0.2 else {}
    )
    text, is_flat = _write_objects(rng, list(zip(boxes, points, strict=True)))
    if is_flat:
        meta["kind"] = "a reversed or flat box"
    return make_example(gold, **meta), text


def _write_objects(rng: random.Random, gold: list[Pair]) -> tuple[str, bool]:
    """Write objects near the gold ones; true: a box has no area, which makes it no answer here."""
    found = rng.sample(gold, rng.randint(0, len(gold)) if rng.random() < 0.3 else len(gold))
    objects = []
    for box, (x, y) in found:
        moved = draw_box_near(rng, box) if rng.random() < 0.6 else box
        point = [x + rng.choice([0, 0, 3, 30]), y + rng.choice([0, 0, 4, 40])]
        objects.append({"bbox_2d": moved, "point_2d": point})
    if rng.random() < 0.2:
        x1, y1, x2, y2 = draw_box(rng)
        objects.append({"bbox_2d": [x1, y1, x2, y2], "point_2d": [x1 + 1, y1 + 1]})
    flat = any(x1 >= x2 or y1 >= y2 for x1, y1, x2, y2 in (item["bbox_2d"] for item in objects))
    text = json.dumps(objects)
    if not objects or rng.random() < 0.7:
        return text, flat
    return rng.choice([text[:-9], text.replace("point_2d", "p"), "[]", "no object", ""]), False


_LEVELS = (1, 1, 0.5, 1.5, 0.8, 1.2, 0.95, 0.9, 1.05, 1.1, 1.3, 2, 0, -1)
_ESTIMATES = (
    "{v}|{v}|{v}|{v}.|{v} {unit}|{v} {unit}.|\n{v}|{v}\n|nan|inf||none|{v} is my estimate"
    "|a unit at the number:{v}{unit}|in a sentence:The answer is {v}."
    "|in a sentence:about {v} {unit}|two answers:{v} or {w}"
    "|two answers:{v} to {w} {unit}|emphasis:**{v}**|another unit:{big} {small}"
    "|another thing:{v} windows|white space before it: {v}"
)
_LETTERS = (
    "{a}|{a}|{a}|{b}|{a}.|{a}. {text}|E||{low}"
    "|in brackets:({a})|in a sentence:The answer is {a}.|two answers:{a} or {b}"
    "|the text of the option:{text}|another option's text:{a}. {other}|emphasis:**{a}**"
)
_QUANTITIES = (
    ("object_abs_distance", "What is the distance between the chair and the bed (in meters)?", "m"),
    ("object_size_estimation", "What is the length of the sofa, in centimeters?", "centimeters"),
    ("room_size_estimation", "What is the size of this room (in square meters)?", "m²"),
    ("object_counting", "How many chairs are in this room?", "chairs"),
)
_SMALLER = {
    "m": (100, "cm"),
    "centimeters": (10, "mm"),
    "m²": (10_000, "cm²"),
    "chairs": (2, "halves"),
}
_CHOSEN = (
    *("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard"),
    *("object_rel_distance", "route_planning", "obj_appearance_order"),
)


def draw_estimate(rng: random.Random) -> tuple[Example, str]:
    """Draw a question of VSI-Bench and an output; ``meta.row`` has the fields of its row."""
    if rng.random() < 0.5:
        kind, question, unit = rng.choice(_QUANTITIES)
        whole = unit in ("centimeters", "chairs")
        gold = float(rng.randint(1, 300)) if whole else round(rng.uniform(0.1, 60), 1)
        value, other = (round(gold * rng.choice(_LEVELS), 4) for _ in range(2))
        factor, small = _SMALLER[unit]
        words = {"v": value, "w": other, "unit": unit, "big": value * factor, "small": small}
        form, truth, answer = rng.choice(_ESTIMATES.split("|")), str(gold), gold
    else:
        kind, options = rng.choice(_CHOSEN), ["left", "right", "back", "front"]
        answer = {"options": options, "answer": rng.choice(options)}
        truth = "ABCD"[options.index(answer["answer"])]
        place = rng.randrange(4) if rng.random() < 0.5 else options.index(answer["answer"])
        a, b = "ABCD"[place], "ABCD"[place - 1]
        words = {"a": a, "b": b, "low": a.lower(), "text": options[place]}
        words |= {"other": options[place - 1]}
        form, question = rng.choice(_LETTERS.split("|")), "Where is the chair?"
    name, _, text = form.rpartition(":")
    row = {"question_type": kind, "ground_truth": truth}
    start, _, level = kind.partition("direction_")
    meta: dict[str, Any] = {"type": f"{start}direction" if level else kind, "level": level or "all"}
    meta["row"] = row
    if name:
        meta["kind"] = name
    example = make_example(answer, **meta)
    return Example("a", example.images, question, answer, example.meta), text.format(**words)


def draw_order(rng: random.Random) -> tuple[Example, str]:
    """Draw the order of 4 or 9 tiles and an output."""
    count = rng.choice([4, 9])
    gold = rng.sample(range(1, count + 1), count)
    found = list(gold)
    for _ in range(rng.randint(0, 2)):
        i, j = rng.sample(range(count), 2)
        found[i], found[j] = found[j], found[i]
    other = rng.sample(range(1, count + 1), count)
    text = ", ".join(map(str, rng.choice([found, found, found, other])))
    changed = ", ".join(map(str, [*found[:-1], rng.choice([found[0], count + 1])]))
    forms = [text, text, text, text.replace(" ", ""), changed, text[: len(text) // 2], "", "none"]
    return make_example({"order": gold}), rng.choice([*forms, f"{text}, {found[0]}"])
