"""Drawn clips: what is asked about is visible in the answer's frames and in no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlm_grpo.data import load_examples
from vlm_grpo.data_scripts.make_clips import draw_examples
from vlm_grpo.data_scripts.make_shapes import COLORS
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, VideoRef

TASK = load_task("temporal")


def get_clip(example: Example) -> VideoRef:
    (clip,) = example.images
    assert isinstance(clip, VideoRef)
    return clip


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_shape_is_visible_in_its_interval(split: str) -> None:
    examples = draw_examples("clips:easy", 40, split=split)
    for example in examples:
        TASK.check(example)
        start, end = example.answer
        color = COLORS[example.question.split()[1]]
        frames = [np.asarray(frame) for frame in get_clip(example).load_frames()]
        seen = [bool((frame == color).all(-1).any()) for frame in frames]
        assert seen == [start <= number < end for number in range(4)]
    assert len({tuple(example.answer) for example in examples}) > 6  # of 10 intervals


def test_the_evaluation_asks_about_other_pairs() -> None:
    asked = [{e.question for e in draw_examples("clips", 200, split=s)} for s in ("train", "eval")]
    assert asked[0].isdisjoint(asked[1])
    assert draw_examples("clips:hard", 3) == draw_examples("clips:hard", 5)[:3]


def test_written_clips_are_read_back(tmp_path: Path) -> None:
    examples = draw_examples("clips", 3)
    rows = load_examples(write_examples(examples, tmp_path / "clips", "clips.jsonl"), TASK)
    for row, example in zip(rows, examples, strict=True):
        assert (row.question, row.answer) == (example.question, example.answer)
        clip, drawn = get_clip(row), get_clip(example)
        assert (clip.times, clip.seconds) == (drawn.times, drawn.seconds)
        pairs = zip(clip.load_frames(), drawn.load_frames(), strict=True)
        assert all(found.tobytes() == expected.tobytes() for found, expected in pairs)
