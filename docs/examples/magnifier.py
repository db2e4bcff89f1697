"""A magnifying glass: the example of docs/your-own-environment.md."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from vlm_grpo.task import reward
from vlm_grpo.task.environment import Environment, Point, tool
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Candidate, Example, ToolCall


class Magnifier(Environment):
    """Look at a place of the image through a magnifying glass."""

    max_turns: int = 3
    width: int = 84
    height: int = 28

    def reset(self, example: Example) -> None:
        self.looks = 0

    @tool
    def magnify(self, at: Point) -> list[str | Image.Image]:
        """Look at a place of the image.

        Args:
            at: the middle of the place.
        """
        if self.looks == 2:
            raise ToolError("the glass may be used twice")
        self.looks += 1
        left = min(max(0, round(at[0]) - self.width // 2), self.image.width - self.width)
        top = min(max(0, round(at[1]) - self.height // 2), self.image.height - self.height)
        part = self.image.crop((left, top, left + self.width, top + self.height))
        return [f"Look {self.looks} of 2:", part]

    def demonstrate(self, example: Example) -> Sequence[ToolCall]:
        calls = []
        for x1, y1, x2, y2 in example.meta["evidence"]:
            calls.append(ToolCall("magnify", {"at": [(x1 + x2) / 2, (y1 + y2) / 2]}))
        return calls

    @reward(weight=0.1)
    def looked_once(self, episode: Candidate) -> float:
        return float(len(episode.turns) == 2)
