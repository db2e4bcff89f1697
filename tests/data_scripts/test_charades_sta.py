"""Charades-STA: the converter, and scores as of the official script."""

from __future__ import annotations

import json
import random
import re

import pytest
from video_files import make_video

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.data_scripts.charades_sta import convert
from vlm_grpo.types import Example, VideoRef

CLIP = VideoRef("clip", (64, 48), (64, 48), times=(0.0, 1.0), seconds=30.0)
LINES = """AAAAA 0.0 1.5##person turns on a light.
BBBBB 1.0 1.0##person sits down.
AAAAA 0.5 2.4 ##a person walks
"""


def test_rows_are_sentences_with_their_intervals(tmp_path):
    (tmp_path / "charades_sta_test.txt").write_text(LINES)
    (tmp_path / "AAAAA.mp4").write_bytes(make_video())
    out = tmp_path / "out.jsonl"
    argv = ["--source", str(tmp_path), "--images", str(tmp_path), "--out", str(out)]
    assert convert.main(argv) == 2  # of 3,720 lines
    assert convert.main([*argv, "--allow-partial"]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]  # the clip has 2.0 s
    assert [(row["question"], row["answer"], row["videos"]) for row in rows] == [
        ("person turns on a light", [0.0, 1.5], ["AAAAA.mp4"]),
        ("a person walks", [0.5, 2.4], ["AAAAA.mp4"]),
    ]
    (tmp_path / "charades_sta_test.txt").write_text("AAAAA 1.5##a person\n")
    other = ["--out", str(tmp_path / "other.jsonl")]
    assert convert.main([*argv[:4], *other]) == 2


PIECES = [
    *("3", "12.5", "7.", ".5", "1.2.3", "to", "and", "-", "TO", "<think>", "</think>", "s", "99"),
    *("<answer>", "</answer>", "from", "4 to 10", "4.0 and 9.5", "12 to 2", "\n", "5 to 5"),
]


def expect(output: str, start: float, end: float) -> dict[str, float]:
    """Return the metrics by their definition, from the last pair that the script would find."""
    pairs = re.findall(r"(\d+\.?\d*) (to|and) (\d+\.?\d*)", output)
    iou = 0.0
    if pairs:
        first, last = float(pairs[-1][0]), float(pairs[-1][2])
        shared = min(end, last) - max(start, first)
        iou = max(0.0, shared / (max(end, last) - min(start, first)))
    recalls = {f"recall_{limit}": float(iou >= limit / 100) for limit in (30, 50, 70)}
    return {**recalls, "iou": iou}


def test_metrics_are_those_of_the_definition():
    task, rng = load_benchmark("charades_sta").load_task(), random.Random(0)
    earned = 0
    for number in range(1000):
        start = round(rng.uniform(0, 20), 1)
        end = round(start + rng.uniform(0.1, 10), 1)
        glue = rng.choice([" ", " ", ""])
        output = glue.join(rng.choice(PIECES) for _ in range(rng.randint(0, 8)))
        if number % 3 == 0:
            output += f" {rng.uniform(0, 20):.2f} to {rng.uniform(0, 30):.2f}"
        score = task.score(output, Example("a", (CLIP,), "a person walks", [start, end]))
        found = {**score.rewards, **score.metrics}
        expected = expect(output, start, end)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9), output
        earned += expected["iou"] > 0
    assert earned > 200


@pytest.mark.parametrize(
    ("gold", "output", "threshold"),
    [
        ([0.2, 1.2], "0.9 to 1.2", 30),
        ([0.1, 5.3], "2.7 to 5.3", 50),
        ([1.3, 2.3], "1.6 to 2.3", 70),
    ],
)
def test_an_iou_that_is_rounded_below_its_threshold_is_no_hit(gold, output, threshold):
    # The IoU is the threshold, but 0.29999999999999993 and so on in the script's arithmetic.
    score = (
        load_benchmark("charades_sta").load_task().score(output, Example("a", (CLIP,), "", gold))
    )
    assert score.metrics[f"recall_{threshold}"] == 0.0
    assert score.rewards["iou"] == pytest.approx(threshold / 100)


def test_a_long_number_is_read_in_linear_time():
    task = load_benchmark("charades_sta").load_task()
    example = Example("a", (CLIP,), "a person walks", [1.0, 2.0])
    assert task.read("9" * 100_000, example) is None
    assert task.read("9" * 400 + " to 5", example) is None
