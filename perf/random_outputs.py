"""Random outputs of models, half of them adversarial, with gold answers near them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from official_scripts import SIDE

from vlm_grpo.types import Example, ImageRef

_WORDS = (
    "exit Exit EXIT café cafe\u0301 straße STRASSE ß 北京 No. 5 the two none Ten 1,000 it's isnt "
    "couldnt've yall'd've 'ows'at y'alld've"
)


def draw_word(rng: random.Random) -> str:
    return rng.choice(["", *_WORDS.split()])


def draw_text(rng: random.Random, gold: str) -> str:
    """Draw an output near a gold text: edited, padded, surrounded by other words, or unrelated."""
    kinds: list[Callable[[], str]] = [
        lambda: gold,
        lambda: gold.upper(),
        lambda: gold.lower() + rng.choice([".", "!", "\n", " ", "  ", "\u200b"]),
        lambda: rng.choice([" ", "\n", "\t"]) * rng.randint(1, 9) + gold,
        lambda: gold + " " * rng.randint(1, 30),
        lambda: f"The answer is {gold}.",
        lambda: edit(rng, gold, rng.randint(1, 1 + len(gold))),
        lambda: gold[: len(gold) // 2],
        lambda: gold + gold,
        lambda: "." * rng.randint(30, 36) + gold,
        lambda: " ".join(draw_word(rng) for _ in range(rng.randint(0, 6))),
        lambda: "".join(rng.choices(" ,.;:'?!-_/()[]{}<>@`=+\\\"ab1٣ß", k=rng.randint(0, 12))),
        lambda: gold.replace(" ", "  ").replace("'", ""),
        lambda: "x" * rng.choice([30, 300, *[3] * 8, 21_000]) + gold,
        lambda: "",
    ]
    return rng.choice(kinds)()


def edit(rng: random.Random, text: str, count: int) -> str:
    letters = list(text)
    for _ in range(count):
        place = rng.randint(0, len(letters))
        letters[place : place + rng.randint(0, 1)] = rng.choices("abx 1", k=rng.randint(0, 1))
    return "".join(letters)


def draw_gold_text(rng: random.Random) -> str:
    while not (text := " ".join(draw_word(rng) for _ in range(rng.randint(1, 7))).strip()):
        pass
    return text


def wrap(rng: random.Random, text: str) -> str:
    """Put a tenth of the outputs into tags, or after thinking."""
    return rng.choice(
        [*["{}"] * 18, "<answer>{}</answer>", "<think>7 [1, 2, 3, 4] x</think>{}"]
    ).replace("{}", text)


def draw_box(rng: random.Random) -> list[int]:
    x, y = rng.randint(0, 60), rng.randint(0, 60)
    return [x, y, x + rng.randint(4, 39), y + rng.randint(4, 39)]


def draw_box_near(rng: random.Random, gold: Sequence[float]) -> list[float]:
    """Draw a box: equal, half of the gold box, shifted, inverted, empty, or unrelated."""
    x1, y1, x2, y2 = gold
    half = [x1, y1, x1 + 2 * (x2 - x1), y2]
    shifted = [round(v + rng.uniform(-6, 6), rng.choice([0, 1])) for v in gold]
    exact = [x1, y1, x2, y1 + rng.choice([0.5, 0.75, 0.9, 0.95]) * (y2 - y1)]
    choices = [list(gold), half, shifted, shifted, exact, [x2, y2, x1, y1], [x1, y1, x1, y2]]
    return [float(v) for v in rng.choice([*choices, draw_box(rng)])]


def write_box(rng: random.Random, box: Sequence[float]) -> str:
    numbers = [int(v) if v == int(v) else v for v in box]
    a, b, c, d = numbers
    kinds = [
        json.dumps({"bbox_2d": numbers}),
        json.dumps([{"bbox_2d": numbers, "label": "cup 2"}]),
        json.dumps({"bbox_2d": numbers}) + json.dumps({"bbox_2d": [1, 2, 3, 4]}),
        json.dumps([{"bbox_2d": numbers}] * 2),
        f"```json\n{json.dumps([{'bbox_2d': numbers}])}\n```",
        f"The 2 dogs: {json.dumps({'bbox_2d': numbers})}",
        json.dumps({"object": {"bbox_2d": numbers}}),
        f'[{{"bbox_2d": [{a}, {b}, {c}, {d}], "label": "cu',
        f"[{a},{b},{c},{d}]",
        f"[ {a},  {b}, {c}, {d} ]",
        f"[{a} {b} {c} {d}]",
        f"({a},{b}),({c},{d})",
        f"[[{a}, {b}, {c}, {d}]]",
        f"[{a}, {b}, {c}]",
        f"{{[{a}, {b}, {c}, {d}]}}",
        "[1e2, 3, 4, 5]",
        "[-1, -2, 30, 40]",
        "no box",
        "",
    ]
    return rng.choice([*kinds[:4], *kinds])


_COUNTS = (
    "{n}|{n}.|#{n}|{n}.0|0{n}|{n}%|about {n}|{n} or {m}|There are {n} apples|**{n}**|A. {n}|-{n}|"
    " {n}|{n} |{n}\n|٣|{n},000|1, 2, {n}|none|zero|One|two|TWELVE|twenty|twenty-one"
)


def draw_count(rng: random.Random, gold: int) -> str:
    number = rng.choice([gold, gold, gold + 1])
    form = rng.choice(["{n}", "{n}", *_COUNTS.split("|")])
    return form.replace("{n}", str(number)).replace("{m}", str(number + 1))


def make_example(answer: Any, **meta: Any) -> Example:
    image = ImageRef(name="a", size=(SIDE, SIDE), resized_size=(SIDE, SIDE), data=b"")
    return Example("a", (image,), "?", answer, meta)


def draw_grounding(rng: random.Random) -> tuple[Example, str]:
    gold = draw_box(rng)
    return make_example({"boxes": [gold]}), wrap(rng, write_box(rng, draw_box_near(rng, gold)))


def draw_tagged_grounding(rng: random.Random) -> tuple[Example, str]:
    example, text = draw_grounding(rng)
    form = rng.choice(["<answer>{}</answer>"] * 6 + ["{}", "<answer>{}", "<answer>x</answer>{}"])
    return example, "<think>a {[1, 2, 3, 4]}</think>" * rng.randint(0, 1) + form.replace("{}", text)


_CLICKS = (
    "({x}, {y})|[{x}, {y}]|{x},{y}|click {x} {y}|{x}|1 {x} {y}|[[{x}, {y}]]|[{x}, {y}] or [1, 1]|"
    '{"point": [{x}, {y}]}|{"action": "click", "coordinate": [{x}, {y}]}|({x}.,{y}.)|-{x},{y}|none|'
    "<box>({l},{t}),({r},{u})</box>|box {x} {y}|[{a}, {b}, {c}, {d}]|({a},{b}),({c},{d})|"
    "{a} {b} {c} {d} 1"
)


def draw_clicking(rng: random.Random) -> tuple[Example, str]:
    """Draw a point inside, on the edge of or outside a box, or a box around it, in any form."""
    gold = draw_box(rng)
    x, y = (rng.choice([gold[i], gold[i + 2], rng.randint(0, 99)]) for i in (0, 1))
    if rng.random() < 0.3:
        x, y = (gold[0] + gold[2]) / 2, (gold[1] + gold[3]) / 2 + rng.choice([0, 0, 0.1, 40])
    numbers = {"x": x, "y": y, "a": x - 3, "b": y - 2, "c": x + 3, "d": y + 2}
    thousandths = (10 * numbers[name] for name in "abcd")  # of a side of 100 pixels
    numbers |= dict(zip("ltru", thousandths, strict=True))
    text = rng.choice(_CLICKS.split("|"))
    for name, number in numbers.items():
        text = text.replace(f"{{{name}}}", f"{number:g}")
    return make_example({"boxes": [gold]}), wrap(rng, text)


_LETTERS = (
    "{l}|({l})|{l}.|{l})|( {l} )|{l}. {t}|({l}) {t}|{t}|The answer is {l}|{l} or A|"
    "**{l}**|Answer: {l}|\n{l}|[{l}]|1|none|It is {l}.|{l}{l}"
)


def draw_choosing(rng: random.Random) -> tuple[Example, str]:
    options = rng.sample(["2", "1", "cat", "a dog", "Bicycle", "the table"], rng.randint(2, 4))
    chosen = rng.randrange(len(options))
    text = rng.choice(["{l}", *_LETTERS.split("|")])
    letter = rng.choice(["ABCD"[chosen], "abcd"[chosen], "Z"])
    text = text.replace("{l}", letter).replace("{t}", options[chosen])
    return make_example({"options": options, "answer": rng.choice(options)}), wrap(rng, text)


def draw_counting(rng: random.Random) -> tuple[Example, str]:
    gold = rng.choice([0, 1, 2, 3, 8, 12, 20, 21])
    return make_example(gold), wrap(rng, draw_count(rng, gold))


def draw_tagged_counting(rng: random.Random) -> tuple[Example, str]:
    example, text = draw_counting(rng)
    form = rng.choice(["<answer>{}</answer>"] * 6 + ["{}", "<answer>{}", "<answer>x</answer>{}"])
    return example, form.replace("{}", text)


def draw_reading(rng: random.Random, **meta: Any) -> tuple[Example, str]:
    golds = [draw_gold_text(rng) for _ in range(rng.randint(1, 3))]
    return make_example(golds, **meta), wrap(rng, draw_text(rng, rng.choice(golds)))


_FIELDS = "25/12/2018|9.00|RM 23.10|UNIHAKKA INTERNATIONAL SDN BHD|12, JALAN TAMPOI 7/4,81200 JOHOR"


def draw_field(rng: random.Random) -> tuple[Example, str]:
    """Draw a receipt's field."""
    gold = rng.choice([*_FIELDS.split("|"), draw_gold_text(rng)])
    return make_example([gold]), wrap(rng, draw_text(rng, gold))


def draw_annotated(rng: random.Random) -> tuple[Example, str]:
    """Draw ten annotators' answers; the rows leave out empty ones."""
    pool = [draw_word(rng) for _ in range(3)] + ["a"]
    given = rng.choices(pool, k=10)
    answers = [answer for answer in given if answer.strip()] or ["x"]
    given = [*answers, *[""] * (10 - len(answers))]
    gold = rng.choice(pool)
    return make_example(answers, answers=10, given=given), wrap(rng, draw_text(rng, gold))


def draw_ocrbench(rng: random.Random) -> tuple[Example, str]:
    return draw_reading(rng, dataset_name=rng.choice(["IIIT5K", "HME100k"]))


def draw_word_image(rng: random.Random) -> tuple[Example, str]:
    gold = rng.choice([draw_gold_text(rng), "&", "24/7"])
    return make_example([gold]), wrap(rng, draw_text(rng, gold))


def draw_scene(rng: random.Random, crowds: bool, most: int) -> tuple[Example, str]:
    """Draw an image's gold objects, and its detections near them or anywhere."""
    labels = ["cat", "red dog", "bus"]
    golds = [(draw_box(rng), rng.choice(labels)) for _ in range(rng.randint(0, 4))]
    regions = [(draw_box(rng), rng.choice(labels)) for _ in range(rng.randint(0, 2) * crowds)]
    found = []
    for box, label in [*golds, *regions] * rng.randint(1, 3):
        x1, y1, x2, y2 = (round(v + rng.uniform(-2, 2), 1) for v in box)
        found.append(((x1, y1, x2, y2), rng.choice([label] * 4 + labels)))
    found += [(tuple(draw_box(rng)), rng.choice(labels)) for _ in range(rng.randint(0, most))]
    rng.shuffle(found)
    meta = {"crowd": to_answer(regions)} if regions else {}
    text = json.dumps([{"bbox_2d": box, "label": label} for box, label in found])
    return make_example(to_answer(golds), **meta), text


def to_answer(objects: Sequence[tuple[Sequence[float], str]]) -> dict[str, list]:
    return {"boxes": [list(b) for b, _ in objects], "labels": [label for _, label in objects]}


_NUMBERS = (
    "{n}|{n}|{n}%|{n} %|{n}%%| {n}|{n}\n|{n}.|+{n}|-{n}|{n}.0|{n}e0|{n}e2|{n}00|$|${n}|{n},000"
    "|1_{n}|{n} or {m}|about {n}|{n} years|nan|inf|-inf|1e999|Infinity|٣|½|YES|yes|No|%|A|(b)"
    "|(A) (B)|B)|the value is {n}|[{n}, {m}]|**{n}**|"
)


def draw_numeric(rng: random.Random) -> tuple[Example, str]:
    """Draw a number near a gold one, also at the tolerance, or a text."""
    gold = rng.choice([0, 1, 2, 20, 100, -4, 0.5, 0.57, 2015, 1234567])
    answer = rng.choice([*[f"{gold}"] * 12, f"{gold}%", "0.0", "Yes", "nan", "inf", "(b)"])
    return make_example(answer), wrap(rng, _write_number(rng, gold))


def _write_number(rng: random.Random, gold: float) -> str:
    near = gold * rng.choice([1, 1, 0.95, 1.05, 1.0500001, 0.9499, 1.02, 1.5, 0.01])
    number = rng.choice([gold, gold, round(near, rng.choice([0, 1, 2, 9]))])
    form = rng.choice([*_NUMBERS.split("|"), *["{n}"] * 20])
    return form.replace("{n}", str(number)).replace("{m}", str(number + 1))


def draw_mathvista(rng: random.Random) -> tuple[Example, str]:
    """Draw a number, or one of two to five choices by its letter, its text or a part of it."""
    gold = rng.choice([3, 12, 0.5, 1.25, 1000])
    kind = rng.choice(["text", "integer", "float", "list"])
    if kind != "text":
        precision = rng.choice([1, 2]) if kind == "float" else None
        meta = {"choices": None, "answer_type": kind, "precision": precision}
        answer = {"integer": str(int(gold)), "float": str(gold), "list": f"[{gold}, {gold + 1}]"}
        return make_example(answer[kind], **meta), _write_number(rng, gold).strip()
    choices = rng.sample(["3", "12", "Yes", "No", "A", "B", "1/2", "145°", "circle"], 4)
    answer = rng.choice(choices)
    letter = "ABCD"[choices.index(answer)]
    forms = [letter, f"({letter})", f"({letter.lower()}) {answer}", f"{letter}.", answer]
    forms += [answer.lower(), answer[1:], "E", "", "?", "(Z)", "none", f"({letter}) or (A)"]
    meta = {"choices": choices, "answer_type": "text", "precision": None}
    return make_example(answer, **meta), rng.choice(forms)
