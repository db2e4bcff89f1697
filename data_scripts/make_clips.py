"""Drawn clips of four frames, one per second, for the task temporal.

World: "clips" (when the red circle is visible), whose difficulty is set by dials. Example ``i``
depends on (dials, seed, split, i) only:
``python -m vlm_grpo.data_scripts.make_clips --count 10 --out DIR``.
"""

from __future__ import annotations

import random
from itertools import combinations
from typing import ClassVar

from PIL import Image
from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import COLORS, draw_mask, list_similar, sample_pair
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image
from vlm_grpo.types import Example, VideoRef

FRAMES = 4
SIDE = 56
"""Width and height of a frame in pixels: 2 × 2 tokens of a Qwen-VL for each pair of frames."""
INTERVALS = tuple(combinations(range(FRAMES + 1), 2))
"""First frame and first frame after, in which a shape can be visible."""
QUADRANTS = ((0, 0), (0, 1), (1, 0), (1, 1))


class Clips(World):
    """State when a shape is visible, among others that share its color or its kind; the evaluation
    asks about other pairs, which no clip of training contains."""

    levels: ClassVar = {
        "easy": {"distractors": 0},
        "medium": {"distractors": 1},
        "hard": {"distractors": 3, "clutter": 4, "noise": 12},
    }

    distractors: int = Field(default=1, ge=0, le=3)
    """Number of other shapes, each visible in an interval of its own."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        (kind, color), pairs = sample_pair(is_new, rng)
        similar = list_similar((kind, color), pairs)
        shown = [(kind, color), *rng.sample(similar, self.distractors)]
        places = rng.sample(QUADRANTS, len(shown))
        intervals = [rng.choice(INTERVALS) for _ in shown]
        background, gray = self.draw_background((SIDE, SIDE), rng)
        size = SIDE // 2
        frames = []
        for number in range(FRAMES):
            frame = background.copy()
            for (other, shade), (x, y), (start, end) in zip(shown, places, intervals, strict=True):
                if start <= number < end:
                    box = (x * size + 3, y * size + 3, (x + 1) * size - 3, (y + 1) * size - 3)
                    frame.paste(self.fade(COLORS[shade], gray), mask=_fit_mask(other, box))
            frames.append(hold_image(self.add_noise(frame, rng), f"{name}-{number}"))
        times = tuple(map(float, range(FRAMES)))
        clip = VideoRef(
            name, (SIDE, SIDE), (SIDE, SIDE), times=times, seconds=FRAMES, frames=tuple(frames)
        )
        return Example(name, (clip,), f"the {color} {kind} is visible", list(intervals[0]))


def _fit_mask(kind: str, box: tuple[int, int, int, int]) -> Image.Image:
    return draw_mask(kind, box).crop((0, 0, SIDE, SIDE))


draw_examples = Generator("clips", {}, {"clips": Clips})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
