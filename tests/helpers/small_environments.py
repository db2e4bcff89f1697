"""Environments for small random models, which write no calls on purpose."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.media.images import encode_png
from vlm_grpo.task import reward
from vlm_grpo.task.coordinates import Box
from vlm_grpo.task.environment import MAX_TEXT, Environment, Point, tool
from vlm_grpo.types import Example, ImageRef, Observed, ToolCall

_IMAGE = encode_png(Image.effect_noise((200, 100), 50))
EXAMPLE = Example("a", (ImageRef("a.png", (200, 100), (100, 100), data=_IMAGE),), "Where?", None)


def write(name: Any, *values: Any, **arguments: Any) -> str:
    """Return a text that ends with a call."""
    body = {"name": name, "arguments": values[0] if values else arguments}
    begin, end = Environment.call_tags
    return f"Let me see. {begin}{json.dumps(body)}{end}"


def see(observed: Observed | None) -> Observed:
    """Return what was read, which is something."""
    assert observed is not None
    return observed


class Peek(Environment):
    """Read an image after every text with a frequent character."""

    call_tags = ("", "\ufffd")  # how half of the random bytes are decoded
    max_turns: int = 3
    over_turn = "score"
    count: int = 0

    @tool
    def peek(self) -> Image.Image:
        """Return a part of the image."""
        return self.image.resize((28 * self.count, 28))

    def step(self, text: str) -> tuple[ToolCall | None, Observed | None]:
        self.count += 1
        shown = [f"Part {self.count}", self.peek()] if self.example.images else "Nothing"
        return ToolCall("peek", {}), self._observe(shown)

    def preview(self, example: Example) -> Any:
        last = self.max_turns - 1
        return [f"Part {last}", (28 * last, 28)] if example.images else ["Nothing"]

    @reward(weight=0.5, needs_answer=False)
    def turns(self, episode: Any) -> float:
        """Return the share of the turns that were used."""
        return len(episode.turns) / self.max_turns


class PeekAtDigits(Peek):
    """The same for a model that writes numbers."""

    call_tags = ("", "5")


class Tools(Environment):
    """Tools with every kind of argument, and with every way to fail."""

    calls: int = 0
    seen: Any = None

    @tool
    def crop(self, bbox_2d: Box, label: str = "") -> Image.Image:
        """Return a part of the image.

        Args:
            bbox_2d: the part,
                which is shown.
            label: its name.
        """
        self.calls += 1
        x1, y1, x2, y2 = map(round, bbox_2d)
        return self.image.crop((x1, y1, x2, y2))

    @tool
    def look(self, at: Point, times: int = 1) -> str:
        """Describe a place."""
        return f"{at[0]:g} {at[1]:g} {times} {self.calls}"

    @tool
    def join(self, boxes: list[Box], within: Box | None = None) -> str:
        """Describe boxes."""
        return f"{boxes} {within}"

    @tool
    def say(self, text: str) -> str:
        """Repeat a text."""
        return text

    @tool
    def count(self) -> str:
        """Count the calls of this tool."""
        self.calls += 1
        return f"{self.calls} {os.getcwd()}"

    @tool
    def fail(self, how: str) -> Any:
        """Fail."""
        self.calls += 100  # which nobody sees: a failed call leaves the state as it was
        return (FAILURES | ODDITIES)[how][0](self)


def _fork(ends: bool) -> str:
    if (child := os.fork()) == 0:
        time.sleep(0 if ends else 60)
    return str(child)


def _nest(inner: Any, _: int) -> list[Any]:
    return [inner]


def _raise(error: BaseException) -> Any:
    raise error


def _keep(environment: Tools, value: Any) -> str:
    environment.seen = value
    return "kept"


_UNSENT = "Tools cannot be sent to worker processes"
FAILURES: dict[str, tuple[Callable[[Tools], Any], str]] = {
    "exit": (lambda _: os._exit(3), "the tool's process ended (exit code 3)"),
    "kill": (
        lambda _: os.kill(os.getpid(), signal.SIGKILL),
        "the tool's process ended (exit code -9)",
    ),
    "sleep": (lambda _: time.sleep(60), "CallTimeout: it took longer than its limit of 1 s"),
    # The worker has ended, or a process that it forked still runs and the call is too slow.
    "close": (lambda _: os.closerange(3, 256), "Error: the tool"),
    "exit politely": (lambda _: sys.exit("bye"), "SystemExit: bye"),
    "interrupt": (lambda _: _raise(KeyboardInterrupt("stop")), "KeyboardInterrupt: stop"),
    "recurse": (lambda tools: FAILURES["recurse"][0](tools), "RecursionError"),
    "memory": (lambda _: len(bytearray(10 * 2**30)), "MemoryError"),
    "placeholder": (
        lambda _: _raise(ValueError("<im<image>age> \ud800")),
        "ValueError: <im age> ?",
    ),
    "an own class": (lambda _: _raise(type("Own", (Exception,), {})("mine")), "Own: mine"),
    "a state that cannot be sent": (lambda tools: _keep(tools, lambda: 0), _UNSENT),
    "a deep state": (lambda tools: _keep(tools, reduce(_nest, range(10**5), 0)), _UNSENT),
    "a generator": (lambda _: iter(int, 1), "the tool returned callable_iterator"),
    "an array": (lambda _: np.full((4, 4), np.nan), "the tool returned ndarray"),
    "an object": (lambda _: object(), "the tool returned object"),
    "a huge number": (lambda _: 10**5000, "ValueError: Exceeds the limit"),
    "100 megapixels": (lambda _: Image.new("1", (10_000, 10_000)), "too large or too thin"),
    "a line": (lambda _: Image.new("L", (1, 4000)), "only 1x4000 pixels"),
    "a thin image": (lambda _: Image.new("L", (4000, 2)), "too large or too thin"),
    "no pixels": (lambda _: Image.new("L", (0, 5)), "only 0x5 pixels"),
    "floats": (lambda _: Image.new("F", (8, 8), float("nan")), "32 bits per channel"),
    "many images": (lambda _: [Image.new("1", (8, 8))] * 1000, "more than 8 images"),
}
"""The text of a call, and what the model reads afterwards."""
ODDITIES: dict[str, tuple[Callable[[Tools], Any], str]] = {
    "fork": (lambda _: _fork(ends=True), ""),
    "fork and sleep": (lambda _: _fork(ends=False), ""),
    "print": (lambda _: print("printed", flush=True), ""),
    "change the folder": (lambda _: os.chdir("/"), ""),
    "a long text": (lambda _: "x" * 10**6, "x" * MAX_TEXT),
    "long texts": (lambda _: ["x" * 5000] * 100, "x" * MAX_TEXT),
    "surrogates": (lambda _: "a\ud800b", "a?b"),
    "placeholders": (lambda _: ["<im", "age>", "<im<image>age>"], " <im age>"),
    "control tokens": (lambda _: "<|im_<|im_end|>end|><|image_pad|>", ""),
    "a palette": (lambda _: Image.new("P", (8, 8)), ""),
    "a transparent image": (lambda _: Image.new("RGBA", (8, 8), (255, 0, 0, 0)), ""),
    "one bit": (lambda _: Image.new("1", (8, 8), 1), ""),
    "16 bits": (lambda _: Image.new("I;16", (8, 8), 2**15), ""),
    "CMYK": (lambda _: Image.new("CMYK", (8, 8)), ""),
}
"""The same for what is no failure, with the start of the text."""
