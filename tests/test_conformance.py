"""Completions and their expected scores: the cases of tests/conformance, by task."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.task.coordinates import FRAMES, ORIGINAL
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef, VideoRef

CASES = {
    path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for path in sorted((Path(__file__).parent / "conformance").glob("*.jsonl"))
}


def test_ids_of_cases_are_unique():
    ids = [case["id"] for cases in CASES.values() for case in cases]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_the_expected_scores(name):
    wrong = [text for case in CASES[name] for text in find_differences(case)]
    assert not wrong, "\n".join(wrong)


def find_differences(case: dict[str, Any]) -> Iterator[str]:
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
        if values[name] != pytest.approx(value, abs=0.01):
            yield f"{case['id']} ({case['why']}): {name} is {values[name]}, not {value}"
    if score.failures:
        yield f"{case['id']} ({case['why']}): {score.failures}"
