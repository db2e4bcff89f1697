"""Converters for the tasks ``numeric`` and ``math``, on rows in the published formats."""

from __future__ import annotations

import pytest
from dataset_files import png, write_files, write_table

IMAGE = {"bytes": png(), "path": None}


def test_chartqa_folder_has_both_types(convert, tmp_path):
    human = {"imgname": "1.png", "query": "How many bars?", "label": "14"}
    augmented = {"imgname": "2.png", "query": "Who leads?", "label": "Italy"}
    files = {"test_human.json": [human], "test_augmented.json": [augmented]}
    files |= {"png/1.png": png(), "png/2.png": png()}
    write_files(tmp_path / "ChartQA", {f"test/{name}": content for name, content in files.items()})
    result = convert("chartqa", tmp_path / "ChartQA", tmp_path / "ChartQA")
    assert result.answers == {"test-human-0": "14", "test-augmented-0": "Italy"}
    assert [row["meta"]["type"] for row in result.rows] == ["human", "augmented"]
    assert result.rows[0]["images"] == ["test/png/1.png"]


def test_chartqa_table(convert, tmp_path):
    row = {"image": IMAGE, "query": "How many?", "label": ["14"], "human_or_machine": 1}
    write_table(tmp_path / "hub/data/test-00000-of-00001.parquet", [row])
    result = convert("chartqa", tmp_path / "hub", tmp_path / "images")
    assert result.answers == {"test-0": ["14"]}
    assert result.rows[0]["meta"] == {"type": "augmented"}


def test_cosyn_has_a_row_for_each_question(convert, tmp_path):
    texts = {
        "question": ["How many?", "Why?", "x?"],
        "answer": ["$1,200", "a " * 101, "\\frac{1}{2}"],
    }
    row = {"id": "t1", "image": IMAGE, "metadata": {"figure_type": "bar", "topic": "x"}}
    row["qa_pairs"] = texts | {"explanation": ["", "", ""]}
    write_table(tmp_path / "chart/validation-00000-of-00001.parquet", [row])
    result = convert("cosyn", tmp_path / "chart", tmp_path / "images")
    assert result.answers == {"t1-0": "$1,200", "t1-2": "\\frac{1}{2}"}
    assert result.rows[0]["meta"] == {"type": "bar"}
    assert result.reasons == {"its answer is no short text": 1}


MATHVISTA = {
    "pid": "7",
    "question": "what is the volume? ",
    "image": "images/7.png",
    "choices": None,
    "unit": "g",
    "precision": 1.0,
    "answer": "1.2",
    "question_type": "free_form",
    "answer_type": "float",
    "metadata": {"split": "testmini", "source": "TextVQA", "task": "textbook", "category": "x"},
}
_NUMBER = {"choices": None, "unit": None, "precision": None}


@pytest.mark.parametrize(
    ("changes", "hint", "end"),
    [
        ({}, "requiring a floating-point number with one decimal", "volume?  (Unit: g)"),
        (_NUMBER | {"answer_type": "integer", "answer": "3"}, "requiring an integer", "volume?"),
        (_NUMBER | {"answer_type": "list", "answer": "[1, 2]"}, "requiring a Python list", "?"),
        (
            _NUMBER | {"choices": ["1°", "2°"], "answer_type": "text", "answer": "2°"},
            "and provide the correct option letter",
            "Choices:\n(A) 1°\n(B) 2°",
        ),
    ],
)
def test_mathvista_asks_with_the_hint_of_the_type(convert, tmp_path, changes, hint, end):
    row = MATHVISTA | changes
    write_files(tmp_path, {"testmini.json": {"7": row}, "images/7.png": png()})
    result = convert("mathvista", tmp_path / "testmini.json", tmp_path)
    assert result.answers == {"7": row["answer"]}
    (written,) = result.rows
    assert written["question"].startswith(f"Hint: Please answer the question {hint}")
    assert written["question"].endswith(end)
    assert written["meta"]["answer_type"] == row["answer_type"]


def test_mathvista_table(convert, tmp_path):
    write_table(tmp_path / "hub/testmini-0.parquet", [MATHVISTA | {"decoded_image": IMAGE}])
    result = convert("mathvista", tmp_path / "hub", tmp_path / "images")
    assert result.answers == {"7": "1.2"}


def test_mathverse_leaves_out_answers_of_several_formulas(convert, tmp_path):
    row = {
        "sample_index": "1",
        "problem_version": "Vision Only",
        "image": "a/1.png",
        "answer": "D",
        "question_type": "multi-choice",
        "metadata": {"subject": "Plane Geometry", "subfield": "Angle"},
        "query_wo": "Please answer directly",
    }
    two = row | {"sample_index": "2", "answer": "$x=1$ or $x=2$"}
    write_files(tmp_path, {"testmini.json": [row, two], "a/1.png": png()})
    result = convert("mathverse", tmp_path, tmp_path)
    assert result.answers == {"1": "D"}
    assert result.reasons == {"its answer is not one formula": 1}
    without = [row | {"image": "", "problem_version": "Text Only"}]
    write_files(tmp_path / "text", {"testmini_text_only.json": without})
    (tmp_path / "out/mathverse.jsonl").unlink()
    result = convert("mathverse", tmp_path / "text", tmp_path, split="text_only")
    assert [row["images"] for row in result.rows] == [[]]


@pytest.mark.parametrize(
    ("name", "split", "row", "row_id"),
    [
        ("geometry3k", "test", {"images": [IMAGE], "problem": "<image>Find x."}, "test-0"),
        ("mmk12", "train", {"id": "a", "image": IMAGE, "subject": "math"}, "a"),
        (
            "virl39k",
            "train",
            {"qid": "q1", "image": ["1.png"], "category": "c", "source": "s", "PassRate_x": 0.5},
            "q1",
        ),
    ],
)
def test_problems_of_training_sets(convert, tmp_path, name, split, row, row_id):
    answer = r"\boxed{\frac{1}{2}}"
    rows = [{"question": "<image>Find x.", **row, "answer": answer}]
    write_table(tmp_path / "hub" / f"{split}-0.parquet", rows)
    write_files(tmp_path / "images", {"1.png": png()})
    result = convert(name, tmp_path / "hub", tmp_path / "images", split=split)
    assert result.answers == {row_id: answer}
    assert result.rows[0]["question"] == "Find x."
    assert len(result.rows[0]["images"]) == 1
    if name == "virl39k":
        assert result.rows[0]["meta"]["PassRate_x"] == 0.5
