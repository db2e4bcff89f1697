"""Read the hour from an analog clock. The guide docs/your-own-task.md explains this file."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.parsing import parse_integer
from vlm_grpo.types import Example

HOURS = range(1, 13)


class Clock(Task):
    """Read the hour from an analog clock; the gold answer is an integer from 1 to 12."""

    primary_metric = "exact"

    def parse(self, text: str, example: Example) -> int | None:
        """Return the hour, or None unless the text contains exactly one integer from 1 to 12."""
        hour = parse_integer(text)
        return hour if hour in HOURS else None

    def write(self, answer: int, example: Example) -> str:
        return str(answer)

    def check(self, example: Example) -> None:
        if type(example.answer) is not int or example.answer not in HOURS:
            raise ValueError(f"the answer {example.answer!r} is not an hour from 1 to 12")

    @reward(weight=1.0)
    def exact(self, answer: int, example: Example) -> float:
        return float(answer == example.answer)

    @reward(weight=0.5)
    def closeness(self, answer: int, example: Example) -> float:
        """Return 1 for the right hour, falling to 0 at four hours off: partial credit early on."""
        return max(0.0, 1 - self.hours_off(answer, example) / 4)

    @metric(without_answer=None)
    def hours_off(self, answer: int, example: Example) -> float:
        """Return the distance of the two hours on the dial, 0 to 6."""
        difference = abs(answer - example.answer)
        return float(min(difference, 12 - difference))

    def draw(self, image: Image.Image, answer: int, example: Example, color: str) -> Image.Image:
        """Draw a hand that points to the predicted hour, for the report."""
        (width, height), angle = image.size, 2 * math.pi * answer / 12
        tip = (width * (0.5 + 0.4 * math.sin(angle)), height * (0.5 - 0.4 * math.cos(angle)))
        drawn = image.copy()
        ImageDraw.Draw(drawn).line([(width / 2, height / 2), tip], fill=color, width=2)
        return drawn
