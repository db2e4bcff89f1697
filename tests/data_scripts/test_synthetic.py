"""Generators of embedded data: reproducible, written as they are drawn, with clear errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_grpo.data_scripts import (
    make_charts,
    make_clips,
    make_screens,
    make_shapes,
    make_tables,
    make_words,
)
from vlm_grpo.data_scripts.synthetic import Generator
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, VideoRef

MODULES = make_charts, make_clips, make_screens, make_shapes, make_tables, make_words
KINDS = [(module.draw_examples, kind) for module in MODULES for kind in module.draw_examples.kinds]
NAMED = pytest.mark.parametrize(("draw", "kind"), KINDS, ids=[kind for _, kind in KINDS])
RECORDED = {
    "counting": "9c3c933de746ab70",
    "cluttered": "86cdc55bed639260",
    "grounding": "1b666cd1b84bf784",
    "crowded": "71569a9980a2043a",
    "ocr": "22e1c26bab8420fe",
}
"""Digests of 100 examples of each kind, of seed 1, drawn before there were dials."""
DIGEST = """
import hashlib
from vlm_grpo.data_scripts.make_shapes import draw_examples
rows = draw_examples("counting", 5, 3) + draw_examples("grounding", 5, 3)
parts = [row.images[0].read_bytes() + repr(row.answer).encode() for row in rows]
print(hashlib.sha256(b"".join(parts)).hexdigest())
"""


@NAMED
def test_the_examples_of_the_recipes_stay_the_same(draw: Generator, kind: str) -> None:
    if kind not in RECORDED:
        return
    digest = hashlib.sha256()
    for row in draw(kind, 100, seed=1):
        answer = repr((row.id, row.question, row.answer, row.meta))
        digest.update(row.images[0].load().tobytes() + answer.encode())
    assert digest.hexdigest()[:16] == RECORDED[kind]


def list_images(rows: list[Example]) -> list[bytes]:
    return [
        image.load_frames()[0].tobytes() + image.load().tobytes()
        if isinstance(image, VideoRef)
        else image.read_bytes()
        for row in rows
        for image in row.images
    ]


@NAMED
def test_an_example_depends_on_seed_split_and_index_only(draw: Generator, kind: str) -> None:
    if kind == "handwriting":
        pytest.importorskip("sklearn")
    ten = draw(kind, 10, seed=4)
    assert draw(kind, 3, seed=4) == ten[:3]
    assert len({*list_images(ten)}) == 10
    assert draw(kind, 3, seed=5) != ten[:3]
    assert list_images(draw(kind, 3, seed=4, split="eval")) != list_images(ten[:3])


def test_another_process_draws_the_same_pixels() -> None:
    draw = make_shapes.draw_examples
    rows = draw("counting", 5, 3) + draw("grounding", 5, 3)
    here = b"".join(row.images[0].read_bytes() + repr(row.answer).encode() for row in rows)
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", DIGEST]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


@NAMED
def test_files_hold_the_same_examples_as_memory(draw: Generator, kind: str, tmp_path: Path) -> None:
    if kind == "handwriting":
        pytest.importorskip("sklearn")
    out = tmp_path / "new" / "scenes"
    argv = ["--count", "3", "--seed", "2", "--split", "eval", "--out", str(out)]
    argv += [] if kind == draw.kinds[0] else ["--task", kind]  # the default
    assert draw.main(argv) == 0
    rows = [json.loads(line) for line in (out / f"{kind}.jsonl").read_text().splitlines()]
    for row, example in zip(rows, draw(kind, 3, 2, "eval"), strict=True):
        assert (row["id"], row["question"]) == (example.id, example.question)
        assert row["answer"] == example.answer
        for path, image in zip(row["images"], example.images, strict=False):
            assert (out / path).read_bytes() == image.data
    assert [path.name for path in out.parent.iterdir()] == ["scenes"], "no temporary folder is left"


def test_a_folder_in_use_and_a_count_of_0_are_errors(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    draw = make_shapes.draw_examples
    assert draw.main(["--count", "1", "--out", str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert draw.main(["--count", "0", "--out", str(tmp_path / "x")]) == 1
    assert "count is 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"'ocr': choose counting, cluttered, .*, choices$"):
        draw("ocr", 1)


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ("relations:oclusion=0.3", r"unknown key oclusion \(did you mean occlusion\?\)\nLevels: "),
        ("relations:occlusion=2", 'occlusion="2" should be less than or equal to 0.6'),
        ("relations:hrad", "relations:hrad: .*\n.*key hrad.*\nLevels: easy, medium, hard; dials: "),
        ("relations:easy,hard", "unknown key hard"),
        ("relations:noise=", 'noise="" should be a whole number'),
        ("attributes:size=30", "shapes of 30 to 34 pixels do not fit into a scene of 84×84: lower"),
        ("charts:easy,bars=9", "Levels: easy, medium, hard; dials: .*questions"),
        ("tables:easy,columns=9", "Levels: easy, medium, hard; dials: .*longest"),
        ("words:fonts=7", 'fonts="7" should be less than or equal to 6'),
        ("counting:hard", "counting has no dials, as in counting:hard; those of attr"),
    ],
)
def test_wrong_dials_are_one_clear_error(dials: str, message: str) -> None:
    (draw,) = (draw for draw, kind in KINDS if kind == dials.partition(":")[0])
    with pytest.raises(UserError, match=message):
        draw(dials, 1)
