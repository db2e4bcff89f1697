"""Completions and their expected scores: the cases of tests/conformance, by task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_grpo.task.coordinates import FRAMES, ORIGINAL
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef, VideoRef

CASES = [
    json.loads(line)
    for path in sorted((Path(__file__).parent / "conformance").glob("*.jsonl"))
    for line in path.read_text(encoding="utf-8").splitlines()
]


def test_ids_of_cases_are_unique():
    assert len({case["id"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['why']}")
def test_a_case_has_the_expected_scores(case):
    frame = FRAMES[case["frame"]] if "frame" in case else ORIGINAL
    options = case.get("options", {})
    task = load_task(case["task"], tags=case["tags"], frame=frame, **options)
    size = tuple(case.get("image_size", (640, 480)))
    resized_size = tuple(case.get("seen", size))
    image = ImageRef(name="image", size=size, resized_size=resized_size)
    if "seconds" in case:
        image = VideoRef("video", size, resized_size, times=(0.0,), seconds=case["seconds"])
    example = Example(case["id"], (image,), case.get("question", "?"), case["gold"])

    task.check(example)
    score = task.score(case["output"], example)

    values = {**score.rewards, **score.metrics}
    for name, value in case["expected"].items():
        # 0.01: the cases state two to four digits, and frames round to whole units.
        assert values[name] == pytest.approx(value, abs=0.01), name
    assert not score.failures
