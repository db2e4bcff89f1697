"""VSI-Bench and SpaceR: their converters, and VSI-Bench's score as its script computes it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dataset_files import png, write_files, write_table
from video_files import make_video

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.data_scripts import spacer, vsi_bench
from vlm_grpo.types import Example, ImageRef


def run(module: Any, folder: Any, source: str) -> list[Any]:
    out = folder / "out.jsonl"
    argv = ["--source", str(folder / source), "--images", str(folder), "--out", str(out)]
    assert module.convert.main([*argv, "--allow-partial"]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return [(row["answer"], row["meta"], row["images"] + row.get("videos", [])) for row in rows]


def test_questions_of_vsi_bench_have_options_or_numbers(tmp_path):
    write_files(tmp_path, {"scannet/room_1.mp4": make_video()})
    common = {"dataset": "scannet", "scene_name": "room_1", "question": "Where?"}
    rows = [
        {"id": 1, "question_type": "object_abs_distance", "ground_truth": "2.3", "options": None},
        {
            **{"id": 2, "question_type": "object_rel_direction_hard", "ground_truth": "B"},
            "options": ["A. left", "B. back"],
        },
    ]
    write_table(tmp_path / "test.parquet", [{**common, **row} for row in rows])
    videos = ["scannet/room_1.mp4"]
    assert run(vsi_bench, tmp_path, "test.parquet") == [
        (2.3, {"type": "object_abs_distance", "level": "all"}, videos),
        (
            {"options": ["left", "back"], "answer": "back"},
            {"type": "object_rel_direction", "level": "hard"},
            videos,
        ),
    ]


def test_questions_of_spacer_with_texts_are_left_out(tmp_path):
    write_files(tmp_path, {"a/1.mp4": make_video(), "b.png": png()})
    rows = [
        ("video", "./a/1.mp4", "numerical", [], "<answer>1,200</answer>"),
        ("image", "b.png", "multiple choice", ["A. up", "B. down"], "<answer>A</answer>"),
        ("image", "b.png", "free-form", [], "<answer>a dog</answer>"),
    ]
    names = ("data_type", "path", "problem_type", "options", "solution")
    lines = [dict(zip(names, row, strict=True)) | {"problem": "?"} for row in rows]
    write_files(tmp_path, {"SpaceR-151k.jsonl": "\n".join(map(json.dumps, lines))})
    assert run(spacer, tmp_path, "SpaceR-151k.jsonl") == [
        (1200.0, {"type": "numerical", "source": ""}, ["a/1.mp4"]),
        (
            {"options": ["up", "down"], "answer": "up"},
            {"type": "multiple choice", "source": ""},
            ["b.png"],
        ),
    ]


def test_the_score_is_that_of_the_script():
    """The script's formulas on random numbers (lmms-eval, vsibench/utils.py)."""
    rng = np.random.default_rng(0)
    task: Any = load_benchmark("vsi_bench").load_task()
    image = ImageRef("a", (64, 48), (64, 48))
    examples, answers, expected = [], [], {}
    for number in range(400):
        gold, guess = round(rng.uniform(1, 9), 1), round(rng.uniform(1, 9), 1)
        kind = ("object_abs_distance", "object_counting")[number % 2]
        thresholds = np.linspace(0.5, 0.95, int((0.95 - 0.5) / 0.05 + 2))
        value = float((abs(guess - gold) / gold <= 1 - thresholds).mean())
        example = Example(str(number), (image,), "How far?", gold, {"type": kind, "level": "all"})
        assert task.score(str(guess), example).metrics["mra"] == value
        expected.setdefault((kind, "all"), []).append(value)
        examples.append(example)
        answers.append(task.read(str(guess), example))
    for number in range(60):
        gold = {"options": ["a", "b"], "answer": "ab"[number % 3 % 2]}
        meta = {"type": "object_rel_direction", "level": ("easy", "hard")[number % 5 % 2]}
        example = Example(f"c{number}", (image,), "Where?", gold, meta)
        expected.setdefault((meta["type"], meta["level"]), []).append(float(gold["answer"] == "a"))
        examples.append(example)
        answers.append(task.read("A", example))
    means = {key: np.mean(values) for key, values in expected.items()}
    direction = np.mean([means.pop(("object_rel_direction", n)) for n in ("easy", "hard")])
    overall = np.mean([*means.values(), direction])
    assert task.corpus_metrics(answers, examples)["category_mean"] == pytest.approx(overall)
