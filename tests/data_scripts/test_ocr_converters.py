"""Tests of the OCR converters on small files in the published layouts."""

from __future__ import annotations

import json

import numpy as np
from dataset_files import png, write_files, write_table
from scipy.io import savemat


def make_ocrbench_row(number: int, answers: object, **more: object) -> dict:
    row = {"dataset_name": "IIIT5K", "id": number, "image_path": "IIIT5K/1.png"}
    row |= {"question": "what is written in the image?", "answers": answers}
    return row | {"type": "Regular Text Recognition", **more}


def test_ocrbench_answers_are_strings_or_lists(convert, tmp_path):
    rows = [make_ocrbench_row(0, "CENTRE"), make_ocrbench_row(1, ["$5", "5 dollars"])]
    # The file counts ids within each dataset.
    rows.append(make_ocrbench_row(0, "STOP", dataset_name="svt"))
    write_files(tmp_path, {"OCRBench.json": rows, "images/IIIT5K/1.png": png()})
    result = convert("ocrbench", tmp_path / "OCRBench.json", tmp_path / "images")
    assert result.answers == {
        "ocrbench-IIIT5K-0": ["CENTRE"],
        "ocrbench-IIIT5K-1": ["$5", "5 dollars"],
        "ocrbench-svt-0": ["STOP"],
    }
    assert result.rows[0]["meta"] == {"dataset_name": "IIIT5K", "type": "Regular Text Recognition"}


def test_ocrbench_table(convert, tmp_path):
    row = {"dataset": "HME100k", "question": "Write the formula.", "answer": ["x ^ 2"]}
    row |= {"question_type": "Handwritten Mathematical Expression Recognition"}
    row |= {"image": {"bytes": png(), "path": None}}
    write_table(tmp_path / "hub" / "test-00000-of-00001.parquet", [row])
    result = convert("ocrbench", tmp_path / "hub", tmp_path / "images")
    assert result.answers == {"ocrbench-0": ["x ^ 2"]}
    assert result.rows[0]["meta"]["dataset_name"] == "HME100k"


def test_textvqa_keeps_all_ten_answers(convert, tmp_path):
    answers = ["nokia"] * 7 + ["nokia phone", "Nokia", ""]
    row = {"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": "what brand?"}
    row |= {"answers": answers, "set_name": "val", "image_width": 64, "image_height": 48}
    file = {"dataset_type": "val", "data": [row, {**row, "question_id": 1, "answers": []}]}
    images = {"train_images/003a8ae2ef43b901.jpg": png()}
    write_files(tmp_path, {"TextVQA_0.5.1_val.json": file} | images)
    result = convert("textvqa", tmp_path, tmp_path / "train_images")
    # The empty tenth answer can match nothing, but meta still counts ten.
    assert result.answers == {"34602": answers[:9]}
    assert result.rows[0]["meta"]["answers"] == 10
    assert result.reasons == {"it has no answers": 1}


def test_textvqa_table(convert, tmp_path):
    row = {"question_id": 5, "image_id": "a", "question": "?", "answers": ["x"] * 10}
    row |= {"image": {"bytes": png(), "path": None}}
    write_table(tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet", [row])
    result = convert("textvqa", tmp_path / "hub", tmp_path / "images", split="val")
    assert result.answers == {"5": ["x"] * 10}


def test_docvqa_file(convert, tmp_path):
    row = {
        "questionId": 49153,
        "question": "What is the ‘actual’ value per 1000, during the year 1975?",
        "question_types": ["figure/diagram"],
        "image": "documents/pybv0228_81.png",
        "docId": 14465,
        "ucsf_document_id": "pybv0228",
        "answers": ["0.28"],
        "data_split": "val",
    }
    file = {"dataset_name": "SP-DocVQA", "dataset_split": "val", "data": [row]}
    write_files(tmp_path, {"val_v1.0_withQT.json": file, "documents/pybv0228_81.png": png()})
    result = convert("docvqa", tmp_path / "val_v1.0_withQT.json", tmp_path)
    assert result.answers == {"49153": ["0.28"]}
    assert result.rows[0]["meta"] == {"type": "figure/diagram", "document": 14465}


def test_infographicvqa_names_its_image_field_differently(convert, tmp_path):
    row = {"questionId": 98313, "question": "Which?", "image_local_name": "38529.jpeg"}
    row |= {"image_url": "https://x.y/z.jpeg", "ocr_output_file": "38529.json"}
    row |= {"answers": ["wake county"], "answer_type": ["single span"], "data_split": "val"}
    file = {"dataset_name": "infographicVQA", "dataset_split": "val", "data": [row]}
    write_files(tmp_path, {"infographicsVQA_val_v1.0_withQT.json": file, "38529.jpeg": png()})
    result = convert("docvqa", tmp_path / "infographicsVQA_val_v1.0_withQT.json", tmp_path)
    assert result.answers == {"98313": ["wake county"]}
    assert result.rows[0]["images"] == ["38529.jpeg"]


def test_docvqa_rows_without_answers_are_refused(convert_with_error, tmp_path):
    row = {"questionId": 1, "question": "What?", "image": "documents/a.png"}
    write_files(tmp_path, {"test_v1.0.json": {"data": [row]}, "documents/a.png": png()})
    message = convert_with_error("docvqa", tmp_path / "test_v1.0.json", tmp_path)
    assert "1 × it has no answers" in message


def test_stvqa_file(convert, tmp_path):
    row = {"file_path": "coco-text/COCO_train2014_1.jpg", "file_name": "COCO_train2014_1.jpg"}
    row |= {"question": "What?", "question_id": 0, "answers": ["STOP", "stop sign"]}
    row |= {"image_height": 48, "image_width": 64, "set_name": "train", "dataset": "coco-text"}
    file = {"task_name": "task 3", "data": [row]}
    write_files(tmp_path, {"train_task_3.json": file, "coco-text/COCO_train2014_1.jpg": png()})
    result = convert("stvqa", tmp_path, tmp_path)
    assert result.answers == {"0": ["STOP", "stop sign"]}
    assert result.rows[0]["meta"] == {"dataset": "coco-text"}


def test_ocrbench_v2_keeps_the_types_it_can_score(convert, tmp_path):
    rows = [
        make_ocrbench_row(0, ["CENTRE"], type="text recognition en"),
        make_ocrbench_row(1, "B", type="science QA en", eval="multiple choice"),
        make_ocrbench_row(2, ["<table>"], type="table parsing en"),
    ]
    write_files(tmp_path, {"OCRBench_v2.json": rows, "images/IIIT5K/1.png": png()})
    result = convert("ocrbench_v2", tmp_path / "OCRBench_v2.json", tmp_path / "images")
    assert result.answers == {"ocrbench-v2-0": ["CENTRE"], "ocrbench-v2-1": ["B"]}
    assert [row["meta"]["eval"] for row in result.rows] == [None, "multiple choice"]
    assert result.rows[1]["meta"]["category"] == "knowledge reasoning"
    assert result.reasons == {"type table parsing en needs a metric that is not supported": 1}


def test_ocrbench_v2_table(convert, tmp_path):
    row = make_ocrbench_row(3, ["x"], type="cognition VQA cn", eval="None", image={"bytes": png()})
    write_table(tmp_path / "hub" / "test-0.parquet", [row])
    result = convert("ocrbench_v2", tmp_path / "hub", tmp_path / "images")
    assert result.rows[0]["meta"]["eval"] is None


def test_iiit5k_file(convert, tmp_path):
    kinds = [("ImgName", object), ("GroundTruth", object)]
    words = [("test/1002_1.png", "PRIVATE"), ("test/1009_2.png", "24")]
    write_files(tmp_path, {name: png() for name, _ in words})
    savemat(tmp_path / "testdata.mat", {"testdata": np.array([words], dtype=kinds)})
    result = convert("iiit5k", tmp_path, tmp_path)
    assert result.answers == {
        "iiit5k-test/1002_1.png": ["PRIVATE"],
        "iiit5k-test/1009_2.png": ["24"],
    }


def test_icdar2015_lines_with_quotes(convert, tmp_path):
    text = '\ufeffword_1.png, "Genaxis Theatre"\r\nword_2.png, "say \\"no, thanks\\""\r\n'
    write_files(tmp_path, {"gt.txt": text, "word_1.png": png(), "word_2.png": png()})
    result = convert("icdar2015", tmp_path, tmp_path, split="train")
    assert result.answers == {
        "train-word_1.png": ["Genaxis Theatre"],
        "train-word_2.png": ['say "no, thanks"'],
    }


def test_a_truncated_icdar2015_file_is_an_error(convert_with_error, tmp_path):
    write_files(tmp_path, {"gt.txt": 'word_1.png, "Gen', "word_1.png": png()})
    assert "gt.txt:1 is corrupt or truncated" in convert_with_error(
        "icdar2015", tmp_path, tmp_path, split="train"
    )


def test_sroie_has_one_question_per_field(convert, tmp_path):
    entities = {"company": "TAN WOON YANN", "date": "25/12/2018", "address": "", "total": "9.00"}
    files = {"test/entities/X001.txt": json.dumps(entities), "test/img/X001.jpg": png()}
    write_files(tmp_path, files)
    result = convert("sroie", tmp_path, tmp_path / "test")
    assert result.answers == {
        "test-X001-company": ["TAN WOON YANN"],
        "test-X001-date": ["25/12/2018"],
        "test-X001-total": ["9.00"],
    }
    assert result.reasons == {"the receipt has no address": 1}
