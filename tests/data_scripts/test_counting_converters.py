"""Tests of the counting converters on small files in the published layouts."""

from __future__ import annotations

import hashlib
from typing import Any

from dataset_files import png, write_files, write_table


def make_clevr_question(number: int, function: str, answer: str) -> dict[str, Any]:
    return {
        "image_index": 0,
        "image_filename": "CLEVR_val_000000.png",
        "question_index": number,
        "question_family_index": 3,
        "question": f"question {number}?",
        "answer": answer,
        "split": "val",
        "program": [
            {"function": "scene", "inputs": [], "value_inputs": []},
            {"function": function, "inputs": [0], "value_inputs": []},
        ],
    }


def test_clevr_keeps_the_questions_that_end_in_a_count(convert, tmp_path):
    questions = [
        make_clevr_question(0, "count", "3"),
        make_clevr_question(1, "exist", "yes"),
        # This question does not ask for a count.
        make_clevr_question(2, "query_size", "large"),
        # The sample in Super-CLEVR's repository has typed answers and no programs.
        {**make_clevr_question(4, "exist", ""), "answer": True},
        make_clevr_question(3, "count", "0"),
    ]
    files = {
        "questions/CLEVR_val_questions.json": {"info": {}, "questions": questions},
        "images/val/CLEVR_val_000000.png": png(),
    }
    source = write_files(tmp_path / "CLEVR_v1.0", files)
    result = convert("clevr", source, source / "images" / "val")
    assert result.answers == {"val-0": 3, "val-3": 0}
    assert result.reasons == {"it does not ask for a count": 3}
    assert result.rows[0]["meta"] == {"question_family": 3}


def test_clevr_scenes_count_all_objects(convert, tmp_path):
    cube = {"color": "red", "size": "large", "material": "metal", "shape": "cube"}
    cube |= {"3d_coords": [0.1, 0.2, 0.3], "pixel_coords": [10, 20, 9.5], "rotation": 1.0}
    scene = {"image_index": 5, "image_filename": "a.png", "objects": [cube] * 4, "split": "val"}
    files = {"CLEVR_val_scenes.json": {"scenes": [scene]}, "images/a.png": png()}
    source = write_files(tmp_path, files)
    result = convert("clevr", source / "CLEVR_val_scenes.json", tmp_path / "images")
    assert result.answers == {"val-5": 4}
    assert result.examples[0].question == "How many items are there in the image?"


def test_r1_v_test_file(convert, tmp_path):
    rows = [
        {
            "image_path": "./images/superCLEVR_new_025000.png",
            "question": "How many different items are there in the image?",
            "ground_truth": 4,
        },
        {"image_path": "images/superCLEVR_new_025000.png", "question": "?", "ground_truth": "12"},
    ]
    write_files(tmp_path, {"test200.jsonl": rows, "images/superCLEVR_new_025000.png": png()})
    result = convert("r1_v", tmp_path / "test200.jsonl", tmp_path / "images")
    assert result.answers == {"test-1": 4, "test-2": 12}


def test_r1_v_training_table_with_answers_in_tags(convert, tmp_path):
    image = {"bytes": png(), "path": "CLEVR_trainA_000000.png"}
    rows = [
        {"image": image, "problem": "How many items?", "solution": "<answer> 3 </answer>"},
        {"image": image, "problem": "What angle?", "solution": "<answer> 45° </answer>"},
        {"image": None, "problem": "How many items?", "solution": "<answer> 5 </answer>"},
    ]
    write_table(tmp_path / "hub" / "train-00000-of-00001.parquet", rows)
    result = convert("r1_v", tmp_path / "hub", tmp_path / "images", split="train")
    assert result.answers == {"train-1": 3}
    assert result.reasons == {
        "its answer is not an integer": 1,
        "its image is missing in the source": 1,
    }


def make_tallyqa_row(number: int, **more: object) -> dict:
    row = {"answer": 2, "data_source": "imported_genome", "image": "VG_100K/1.jpg"}
    return row | {"image_id": 1, "question": "How many?", "question_id": number, **more}


def test_tallyqa_rows_are_simple_or_complex(convert, tmp_path):
    # A question's id counts within its image.
    rows = [make_tallyqa_row(1, issimple=True)]
    rows.append(make_tallyqa_row(1, issimple=False, answer=0, image_id=2))
    source = write_files(tmp_path, {"test.json": rows, "images/VG_100K/1.jpg": png()})
    result = convert("tallyqa", source, tmp_path / "images")
    assert result.answers == {"test-1-1": 2, "test-2-1": 0}
    assert [row["meta"]["kind"] for row in result.rows] == ["simple", "complex"]


def test_super_clevr_reads_the_counting_questions_of_a_split(convert, tmp_path):
    """The indices are the last of train's and val's images, and the first of test's."""
    questions: list[dict[str, Any]] = []
    for number, image in enumerate([19_999, 24_999, 25_000]):
        question = make_clevr_question(number, "count", "") | {"answer": 7 + number}
        del question["program"]
        questions.append(question | {"image_index": image, "image_filename": "a.png"})
    files = {"superCLEVR_questions_30k.json": {"questions": questions}, "images/a.png": png()}
    write_files(tmp_path, files)
    for split, answer in [("train", 7), ("val", 8), ("test", 9)]:
        result = convert("super_clevr", tmp_path, tmp_path / "images", split=split)
        assert list(result.answers.values()) == [answer]
        (tmp_path / "out" / "super_clevr.jsonl").unlink()


def test_countbenchqa_refuses_missing_images(convert, tmp_path):
    row = {"text": "Five cups.", "question": "How many cups?", "number": 5}
    rows = [row | {"image": {"bytes": png(), "path": None}}, row | {"image": None}]
    write_table(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", rows)
    result = convert("countbenchqa", tmp_path / "hub", tmp_path / "images")
    assert result.answers == {"countbenchqa-0": 5}
    assert result.reasons == {"its image is missing in the source": 1}


def test_pixmo_count_checks_the_hash_of_downloaded_images(convert, tmp_path):
    good, changed = hashlib.sha256(png()).hexdigest(), hashlib.sha256(png(shade=1)).hexdigest()
    row = {"image_url": "https://x.y/z.jpg", "count": 3, "label": "cups"}
    digests = [good, changed, hashlib.sha256(b"").hexdigest()]
    rows = [row | {"image_sha256": digest} for digest in digests]
    write_table(tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet", rows)
    write_files(tmp_path / "images", {f"{good}.jpg": png(), f"{changed}.png": png(shade=2)})
    result = convert("pixmo_count", tmp_path / "hub", tmp_path / "images", split="val")
    assert result.answers == {"val-0": 3}
    assert result.rows[0]["question"] == "How many cups are there in the image?"
    assert result.reasons == {
        "its image has changed since publication": 1,
        "its image is missing in the source": 1,
    }


def test_fsc147_counts_the_annotated_points(convert, tmp_path):
    annotation = {"H": 48, "W": 64, "points": [[1.5, 2.0]] * 9, "box_examples_coordinates": []}
    files = {
        "annotation_FSC147_384.json": {"2.jpg": annotation, "3.jpg": annotation},
        "Train_Test_Val_FSC_147.json": {"train": ["3.jpg"], "val": [], "test": ["2.jpg"]},
        "ImageClasses_FSC147.txt": "2.jpg\tsea shells\n3.jpg\thot air balloons\n",
    }
    write_files(tmp_path, files | {"images/2.jpg": png()})
    result = convert("fsc147", tmp_path, tmp_path / "images")
    assert result.answers == {"test-2.jpg": 9}
    assert result.rows[0]["question"] == "How many sea shells are there in the image?"
