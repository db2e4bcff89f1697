"""Environments for small random models, which write no calls on purpose."""

from __future__ import annotations

import os
import time
from typing import Any

from PIL import Image

from vlm_grpo.task import reward
from vlm_grpo.task.coordinates import Box
from vlm_grpo.task.environment import Environment, Point, tool
from vlm_grpo.types import Observed, ToolCall


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

    @reward(weight=0.5)
    def turns(self, episode: Any) -> float:
        """Return the share of the turns that were used."""
        return len(episode.turns) / self.max_turns


class PeekAtDigits(Peek):
    """The same for a model that writes numbers."""

    call_tags = ("", "1")


class Tools(Environment):
    """Tools with every kind of argument, and with every way to fail."""

    calls: int = 0

    @tool
    def crop(self, bbox_2d: Box, label: str = "") -> Image.Image:
        """Return a part of the image.

        Args:
            bbox_2d: the part,
                which is shown.
            label: its name.
        """
        self.calls += 1
        return self.image.crop(tuple(map(round, bbox_2d)))

    @tool
    def look(self, at: Point, times: int = 1) -> str:
        """Describe a place."""
        return f"{at[0]:g} {at[1]:g} {times} {self.calls}"

    @tool
    def fail(self, how: str) -> Any:
        """Fail."""
        if how == "exit":
            os._exit(3)
        if how == "sleep":
            time.sleep(60)
        if how == "long":
            return "x" * 10**6
        if how == "huge":
            return Image.new("L", (8000, 8000))
        if how == "thin":
            return Image.new("L", (4000, 2))
        if how == "odd":
            return object()
        raise SystemExit(how)
