"""Environments: schemas, boxes in every frame, and calls and results that no tool expects."""

import json
import re
from typing import Any

import pytest
from PIL import Image
from small_environments import EXAMPLE, Tools, see, write

from vlm_grpo.errors import UserError
from vlm_grpo.task import registry
from vlm_grpo.task.coordinates import FRAMES, Box
from vlm_grpo.task.environment import Environment, find_tools, tool
from vlm_grpo.task.tool_calls import parse_call
from vlm_grpo.types import Example, Observed, ToolCall

TAGS = Environment.call_tags


def start(frame: str = "original", example: Example = EXAMPLE) -> Tools:
    environment = Tools().adapt(FRAMES[frame])
    environment.begin(example)
    return environment


def read(text: str, frame: str = "original", example: Example = EXAMPLE) -> Observed:
    return see(start(frame, example).step(text)[1])


def wrap(body: str) -> str:
    return f"{TAGS[0]}{body}{TAGS[1]}"


def look(at: str) -> str:
    return wrap(f'{{"name": "look", "arguments": {{"at": {at}}}}}')


def crop(box: Any) -> str:
    return write("crop", bbox_2d=box)


IMAGE = "<image>"
DEEP = "[" * 9000 + "]" * 9000
HOSTILE: dict[str, tuple[str, str]] = {
    "a reversed box": (crop([90, 90, 10, 10]), "no area inside the image: write x1 < x2"),
    "outside": (crop([500, 500, 600, 600]), "no area inside the image"),
    "too large": (crop([0, 0, 1e7, 5]), "too large"),
    "a huge integer": (crop([0, 0, 10**1000, 5]), "too large"),
    "not a number": (look("[NaN, 1]"), "not JSON (Out of range"),
    "more digits than Python reads": (look(f"[{'9' * 5000}, 1]"), "not JSON"),
    "three numbers": (crop([1, 2, 3]), "bbox_2d must be a list of 4 numbers"),
    "truth values": (crop([True, False, 3, 4]), "bbox_2d must be a list of 4 numbers"),
    "a text": (crop("1, 2, 3, 4"), "bbox_2d must be a list of 4 numbers"),
    "a point outside": (write("look", at=[201, 50]), "at is outside the image"),
    "boxes that are none": (write("join", boxes=[1, 2, 3, 4]), "boxes must be a list of 4 numbers"),
    "one box for several": (write("join", boxes=3), "boxes must be a list of lists"),
    "a wrong type": (write("look", at=[1, 1], times="often"), "times: input should be a valid int"),
    "an unknown tool": (write("format_disk"), "no tool 'format_disk'; there is crop, look, join"),
    "a method that is no tool": (write("reset", example=1), "there is no tool 'reset'"),
    "a long name": (write("x" * 10_000), "there is no tool 'xxx"),
    "a place of an image as a name": (write(IMAGE), "there is no tool"),
    "an unknown argument": (write("look", at=[1, 1], self=1), "look has no argument 'self'"),
    "no argument": (write("look"), "look needs the argument at"),
    "no arguments at all": (wrap('{"name": "look"}'), "look needs the argument at"),
    "arguments in a list": (write("look", [1, 2]), "the call must have the form"),
    "a list of calls": (wrap('[{"name": "look", "arguments": {}}]'), "the call must have the form"),
    "a name that is no text": (write(7), "the call must have the form"),
    "Python": (wrap("look(at=(1, 1))"), "the call is not JSON"),
    "deep JSON": (look(DEEP), "the call has more than 200 lists and objects"),
    "deep values": (wrap(f"<function=say><parameter=text>{DEEP}</parameter></function>"), "200"),
    "a megabyte": (write("say", text="x" * 2**20), "characters, more than 20000"),
    "no end": (wrap(f"<function=say>{'<parameter=a>' * 1500}</function>"), "needs"),
    "a function without an end": (wrap("<function=say>"), "the call is not JSON"),
    "only the end of a call": ("x" * 10**6 + TAGS[1], "the call does not begin with <tool_call>"),
}


@pytest.mark.parametrize(("text", "answer"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_call_is_answered_in_text(text, answer):
    call, observed = start().step(text)
    assert observed is not None
    assert observed.text.startswith("Error: ")
    assert answer in observed.text
    assert observed.is_error
    assert len(observed.text) < 1000
    assert IMAGE not in observed.text
    json.dumps(call and dict(call.arguments), allow_nan=False)


READ: dict[str, tuple[str, str]] = {
    "a point": (write("look", at=[10, 20.5]), "10 20.5 1 0"),
    "a number as text": (write("look", at=[1, 2], times="3"), "1 2 3 0"),
    "over the edge": (write("join", boxes=[[-5, -5, 1000, 20]]), "[(0.0, 0.0, 200.0, 20.0)] None"),
    "parameters": (
        wrap("<function=look>\n<parameter=at>\n[1, 2]\n</parameter>\n</function>"),
        "1 2 1 0",
    ),
    "the last of two begins": (f"{TAGS[0]}no {write('say', text='b')}", "b"),
    "the first of two calls": (write("say", text="a") + write("say", text="b"), "a"),
    "unicode": (write("say", text="日本 🦊 \u202e"), "日本 🦊 \u202e"),
    "half a surrogate pair": (write("say", text="a\ud800b"), "a?b"),
    "a place of an image": (write("say", text="<im<image>age>"), "<im age>"),
    "a zero byte": (write("say", text="\0"), "\0"),
}
IN_FRAMES: dict[str, tuple[str, str, str]] = {
    "thousandths": ("permille", write("look", at=[100, 500]), "20 50 1 0"),
    "y first": ("gemma4", write("look", at=[500, 100]), "20 50 1 0"),
    # 100 x 100 pixels for the model, 200 x 100 in the original
    "resized": ("resized", write("look", at=[10, 50]), "20 50 1 0"),
    "lists of boxes": (
        "gemma4",
        write("join", boxes=[[0, 100, 500, 1000]], within=[0, 0, 1000, 1000]),
        "[(20.0, 0.0, 200.0, 50.0)] (0.0, 0.0, 200.0, 100.0)",
    ),
    "no box": ("permille", write("join", boxes=[], within=None), "[] None"),
}
IN_FRAMES |= {name: ("original", text, answer) for name, (text, answer) in READ.items()}


@pytest.mark.parametrize(("frame", "text", "answer"), IN_FRAMES.values(), ids=IN_FRAMES)
def test_an_odd_call_that_can_be_read_is_answered(frame, text, answer):
    assert read(text, frame) == Observed(answer)


@pytest.mark.parametrize("text", ["", "The answer is 7.", TAGS[0], write("say")[:-2], "x" * 10**6])
def test_a_text_without_a_whole_call_ends_the_episode(text):
    assert start().step(text) == (None, None)


def test_a_box_needs_an_image_and_a_turned_photograph_is_turned_once(tmp_path):
    observed = read(crop([1, 1, 9, 9]), example=Example("a", (), "", None))
    assert observed == Observed("Error: there is no image for bbox_2d", is_error=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # its left side is up
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    reference = EXAMPLE.images[0].__class__("a", (20, 40), (20, 40), path=tmp_path / "a.jpg")
    observed = read(crop([0, 0, 20, 30]), example=Example("a", (reference,), "", None))
    assert observed.images[0].size == (20, 30)


def test_a_tool_is_described_by_its_hints_and_its_docstring():
    described = {t["function"]["name"]: t["function"] for t in start("gemma4").describe(EXAMPLE)}
    crop = described["crop"]
    assert crop["description"] == "Return a part of the image."
    assert crop["parameters"]["required"] == ["bbox_2d"]
    box = crop["parameters"]["properties"]["bbox_2d"]
    assert box["description"] == "the part, which is shown. [y1, x1, y2, x2], scaled to 0-1000."
    assert (box["type"], box["minItems"], box["maxItems"]) == ("array", 4, 4)
    point = described["look"]["parameters"]["properties"]["at"]
    assert point["description"] == "[y, x], scaled to 0-1000."
    boxes = described["join"]["parameters"]["properties"]["boxes"]
    assert (boxes["items"], boxes["type"]) == ({k: box[k] for k in boxes["items"]}, "array")


def test_calls_that_are_written_are_read():
    call = ToolCall("say", {"text": 'a "quoted" 日本'})
    assert parse_call(start().write(call), TAGS) == call
    boxes = [(20.0, 10.0, 100.0, 60.0), (0.0, 0.0, 200.0, 100.0)]
    call = ToolCall("join", {"boxes": boxes, "within": boxes[0]})
    for name, frame in FRAMES.items():
        observed = read(start(name).write(call), name)
        found = [float(number) for number in re.findall(r"[\d.]+", observed.text)]
        # Numbers are rounded to the frame's units: 1 in 1000 of 200 pixels, here.
        assert found == pytest.approx([*boxes[0], *boxes[1], *boxes[0]], abs=0.2), frame


def test_wrong_tools_are_refused_when_their_class_is_defined():
    def refuse(message: str, *arguments: Any) -> None:
        with pytest.raises(TypeError, match=re.escape(message)):
            tool(*arguments)

    def bare(self, a):
        """Do it."""

    def many(self, *a: int):
        """Do it."""

    refuse("has no docstring", lambda self: None)
    refuse("the argument a has no type hint", bare)
    refuse("write each argument instead of", many)
    with pytest.raises(TypeError, match=r"Odd\.step: a tool cannot have this name"):

        class Odd(Environment):
            @tool
            def step(self, text: str) -> str:
                """Replace the method of the library."""
                return text


class Unwritable(Environment):
    @tool
    def show(self, image: Image.Image, box: Box) -> None:
        """Take what JSON cannot hold."""


def test_an_argument_that_json_cannot_hold_is_refused():
    assert list(find_tools(Unwritable)) == ["show"]
    with pytest.raises(UserError, match=r"environment .*: a tool's argument has a wrong hint"):
        registry.load_environment({"name": f"{__file__}:Unwritable"})
