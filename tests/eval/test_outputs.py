"""Scores of files of outputs, also as lmms-eval logs them, and rows that match no example."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run, write_jsonl
from PIL import Image
from published_formats import lmms_eval_sample

from vlm_grpo.errors import UserError
from vlm_grpo.eval.outputs import read_outputs
from vlm_grpo.types import Example, ImageRef

IMAGE = ImageRef("a", (84, 84), (84, 84), data=b"")
EXAMPLES = [Example(f"row {n}", (IMAGE,), f"What is on sign {n}?", f"EXIT {n}") for n in range(9)]
SIGN_1 = lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT")
FIRST = {"id": EXAMPLES[0].id, "output": "3"}


def write_data(folder: Path, *given: tuple[str, Any]) -> Path:
    """Write rows with these questions and answers and the same image of 640 x 480 pixels."""
    Image.new("RGB", (640, 480)).save(folder / "a.png")
    rows = [
        {"id": f"row {n}", "images": ["a.png"], "question": question, "answer": answer}
        for n, (question, answer) in enumerate(given)
    ]
    return write_jsonl(folder / "data.jsonl", *rows)


def score_as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    status, out, err = run(capsys, "evaluate", *arguments, "--json")
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_boxes_of_lmms_eval_are_fractions_of_the_image(capsys, tmp_path):
    prompt = "All values are floating point numbers bounded between 0 and 1. {}"
    boxes = {"the cup": [64, 48, 320, 240], "the red cup": [0, 0, 100, 100], "it": [1, 2, 30, 40]}
    rows = [  # the cup's box, and the left half of the red cup's, in an image of 640 x 480
        lmms_eval_sample(0, prompt.format("the cup"), resps=[["[0.1, 0.1, 0.5, 0.5]"]]),
        lmms_eval_sample(1, prompt.format("the red cup"), resps=[["[0.0, 0.0, 0.078, 0.208]"]]),
    ]
    data = write_data(tmp_path, *((name, {"boxes": [box]}) for name, box in boxes.items()))
    given = ["--predictions", write_jsonl(tmp_path / "log", *rows), "--frame", "fraction"]
    given += ["--data", data]
    first, second, total = score_as_json(capsys, "grounding", *given)
    assert first["rewards"]["iou"] == pytest.approx(1.0)
    assert second["rewards"]["iou"] == pytest.approx(0.5, abs=0.01)  # 49.92 x 99.84 of 100 x 100
    assert total["total"]["n"] == 2
    status, out, _ = run(capsys, "evaluate", "grounding", *given)
    assert (status, "1 more examples have no output in the file" in out) == (0, True)


def test_lmms_eval_samples_are_matched_by_index(capsys, tmp_path):
    rows = [
        # The format of newer versions, of older versions, and a response that a filter changed.
        lmms_eval_sample(2, "What is on sign 2?", filtered_resps="EXIT"),
        lmms_eval_sample(0, "What is on sign 0?", filtered_resps=["Exit"]),
        lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT", resps=[["EXIT sign"]]),
    ]
    data = write_data(tmp_path, *((f"What is on sign {n}?", ["EXIT", "Exit"]) for n in range(3)))
    given = ["--predictions", write_jsonl(tmp_path / "log", *rows), "--data", data]
    *scores, total = score_as_json(capsys, "ocr", *given, "tags=false")
    assert [row["answer"] for row in scores] == ["Exit", "EXIT sign", "EXIT"]
    assert total["total"]["metrics"]["exact"] == pytest.approx(2 / 3)


def test_rows_of_another_form_or_of_other_examples_are_named(tmp_path):
    two_responses = {"doc_id": 0, "resps": [["a", "b"]]}
    for lines, message in (
        ([FIRST], f"no output for id '{EXAMPLES[1].id}'"),
        ([{"name": "x"}], r'a row is \{"id": …, "output": text\}, or a sample logged by lmms-eval'),
        ([{"id": "other", "output": "3"}], "no example has the id 'other'"),
        ([FIRST] * 2, "has an output already"),
        ([SIGN_1, two_responses], "p.jsonl:2: a sample of lmms-eval must have"),
        ([{"doc_id": "0", "resps": "a"}], "a sample of lmms-eval must have doc_id"),
        ([{"doc_id": 9, "resps": [["a"]]}], r"number 9 \(from 0\) does not exist"),
        ([SIGN_1, SIGN_1], "p.jsonl:2: example row 1 has an output already"),
        ([{**SIGN_1, "doc_id": 0}], "contain 'What is on sign 0.', example number 0's question"),
        ([{**FIRST, "output": 3}], ":1: a row is"),
        ([{**FIRST, "turns": [{}]}], ":1: its turns cannot be read: KeyError"),
        (['"a text"'], "p.jsonl:1: "),
    ):
        path = write_jsonl(tmp_path / "p.jsonl", *lines)
        with pytest.raises(UserError, match=message):
            read_outputs(path, EXAMPLES)
    # With --frame resized, missing sizes are named, too.
    for wrong in ({}, {"seen": [9, 9]}, {"seen": [[0, 9]]}, {"seen": []}):
        path = write_jsonl(tmp_path / "p.jsonl", {**FIRST, **wrong})
        read_outputs(path, EXAMPLES[:1])
        with pytest.raises(UserError, match='--frame resized needs "seen"'):
            read_outputs(path, EXAMPLES[:1], needs_resized_size=True)
