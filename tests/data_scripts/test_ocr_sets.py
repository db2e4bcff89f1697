"""Converters for reading text on fixtures in their datasets' layouts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dataset_files import png, put, put_table
from scipy.io import savemat


def ocrbench(number: int, answers: object, **more: object) -> dict:
    row = {"dataset_name": "IIIT5K", "id": number, "image_path": "IIIT5K/1.png"}
    row |= {"question": "what is written in the image?", "answers": answers}
    return row | {"type": "Regular Text Recognition", **more}


def test_ocrbench_answers_are_strings_or_lists(convert, tmp_path):
    rows = [ocrbench(0, "CENTRE"), ocrbench(1, ["$5", "5 dollars"])]
    put(tmp_path, {"OCRBench.json": rows, "images/IIIT5K/1.png": png()})
    done = convert("ocrbench", tmp_path / "OCRBench.json", tmp_path / "images")
    assert done.answers == {"ocrbench-0": ["CENTRE"], "ocrbench-1": ["$5", "5 dollars"]}
    assert done.rows[0]["meta"] == {"dataset_name": "IIIT5K", "type": "Regular Text Recognition"}


def test_ocrbench_table(convert, tmp_path):
    row = {"dataset": "HME100k", "question": "Write the formula.", "answer": ["x ^ 2"]}
    row |= {"question_type": "Handwritten Mathematical Expression Recognition"}
    row |= {"image": {"bytes": png(), "path": None}}
    put_table(tmp_path / "hub" / "test-00000-of-00001.parquet", [row])
    done = convert("ocrbench", tmp_path / "hub", tmp_path / "images")
    assert done.answers == {"ocrbench-0": ["x ^ 2"]}
    assert done.rows[0]["meta"]["dataset_name"] == "HME100k"


def test_textvqa_keeps_all_ten_answers(convert, tmp_path):
    answers = ["nokia"] * 7 + ["nokia phone", "Nokia", ""]
    row = {"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": "what brand?"}
    row |= {"answers": answers, "set_name": "val", "image_width": 64, "image_height": 48}
    file = {"dataset_type": "val", "data": [row, {**row, "question_id": 1, "answers": []}]}
    images = {"train_images/003a8ae2ef43b901.jpg": png()}
    put(tmp_path, {"TextVQA_0.5.1_val.json": file} | images)
    done = convert("textvqa", tmp_path, tmp_path / "train_images")
    # The empty tenth answer can match nothing, but still counts as one of ten.
    assert done.answers == {"34602": answers[:9]}
    assert done.rows[0]["meta"]["answers"] == 10
    assert done.reasons == {"it has no answers": 1}


def test_textvqa_table(convert, tmp_path):
    row = {"question_id": 5, "image_id": "a", "question": "?", "answers": ["x"] * 10}
    row |= {"image": {"bytes": png(), "path": None}}
    put_table(tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet", [row])
    done = convert("textvqa", tmp_path / "hub", tmp_path / "images", split="val")
    assert done.answers == {"5": ["x"] * 10}


def test_docvqa(convert, tmp_path):
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
    put(tmp_path, {"val_v1.0_withQT.json": file, "documents/pybv0228_81.png": png()})
    done = convert("docvqa", tmp_path / "val_v1.0_withQT.json", tmp_path)
    assert done.answers == {"49153": ["0.28"]}
    assert done.rows[0]["meta"] == {"type": "figure/diagram", "document": 14465}


def test_infographics_name_the_image_otherwise(convert, tmp_path):
    row = {"questionId": 98313, "question": "Which?", "image_local_name": "38529.jpeg"}
    row |= {"image_url": "https://x.y/z.jpeg", "ocr_output_file": "38529.json"}
    row |= {"answers": ["wake county"], "answer_type": ["single span"], "data_split": "val"}
    file = {"dataset_name": "infographicVQA", "dataset_split": "val", "data": [row]}
    put(tmp_path, {"infographicsVQA_val_v1.0_withQT.json": file, "38529.jpeg": png()})
    done = convert("docvqa", tmp_path / "infographicsVQA_val_v1.0_withQT.json", tmp_path)
    assert done.answers == {"98313": ["wake county"]}
    assert done.rows[0]["images"] == ["38529.jpeg"]


def test_docvqa_test_split_has_no_answers(fails, tmp_path):
    row = {"questionId": 1, "question": "What?", "image": "documents/a.png"}
    put(tmp_path, {"test_v1.0.json": {"data": [row]}, "documents/a.png": png()})
    message = fails("docvqa", tmp_path / "test_v1.0.json", tmp_path)
    assert "1 × it has no answers" in message


def test_stvqa(convert, tmp_path):
    row = {"file_path": "coco-text/COCO_train2014_1.jpg", "file_name": "COCO_train2014_1.jpg"}
    row |= {"question": "What?", "question_id": 0, "answers": ["STOP", "stop sign"]}
    row |= {"image_height": 48, "image_width": 64, "set_name": "train", "dataset": "coco-text"}
    file = {"task_name": "task 3", "data": [row]}
    put(tmp_path, {"train_task_3.json": file, "coco-text/COCO_train2014_1.jpg": png()})
    done = convert("stvqa", tmp_path, tmp_path)
    assert done.answers == {"0": ["STOP", "stop sign"]}
    assert done.rows[0]["meta"] == {"dataset": "coco-text"}


@pytest.mark.parametrize(
    ("name", "file"),
    [("ocrbench", "OCRBench.json"), ("textvqa", "TextVQA_0.5.1_val.json"), ("docvqa", "v.json")],
)
def test_a_cut_off_file_gives_one_message_and_no_output(fails, tmp_path, name, file):
    put(tmp_path, {file: '{"data": [{"question": "Wh'})
    message = fails(name, tmp_path / file, tmp_path / "images")
    assert f"{file} is corrupt or cut off" in message
    assert message.count("\n") == 1


def test_ocrbench_v2_keeps_what_it_can_score(convert, tmp_path):
    rows = [
        ocrbench(0, ["CENTRE"], type="text recognition en"),
        ocrbench(1, "B", type="science QA en", eval="multiple choice"),
        ocrbench(2, ["<table>"], type="table parsing en"),
    ]
    put(tmp_path, {"OCRBench_v2.json": rows, "images/IIIT5K/1.png": png()})
    done = convert("ocrbench_v2", tmp_path / "OCRBench_v2.json", tmp_path / "images")
    assert done.answers == {"ocrbench-v2-0": ["CENTRE"], "ocrbench-v2-1": ["B"]}
    assert [row["meta"]["eval"] for row in done.rows] == [None, "multiple choice"]
    assert done.rows[1]["meta"]["category"] == "knowledge reasoning"
    assert done.reasons == {"type table parsing en needs a script of its own": 1}


def test_ocrbench_v2_table(convert, tmp_path):
    row = ocrbench(3, ["x"], type="cognition VQA cn", eval="None", image={"bytes": png()})
    put_table(tmp_path / "hub" / "test-0.parquet", [row])
    done = convert("ocrbench_v2", tmp_path / "hub", tmp_path / "images")
    assert done.rows[0]["meta"]["eval"] is None


def test_iiit5k(convert, tmp_path):
    kinds = [("ImgName", object), ("GroundTruth", object)]
    words = [("test/1002_1.png", "PRIVATE"), ("test/1009_2.png", "24")]
    put(tmp_path, {name: png() for name, _ in words})
    savemat(tmp_path / "testdata.mat", {"testdata": np.array([words], dtype=kinds)})
    done = convert("iiit5k", tmp_path, tmp_path)
    assert done.answers == {"iiit5k-test/1002_1.png": ["PRIVATE"], "iiit5k-test/1009_2.png": ["24"]}


def test_iiit5k_cut_off(fails, tmp_path):
    put(tmp_path, {"testdata.mat": b"MATLAB 5.0 MAT-file"})
    assert "testdata.mat is corrupt, cut off or not IIIT5K's" in fails("iiit5k", tmp_path, tmp_path)


def test_icdar2015(convert, tmp_path):
    text = '\ufeffword_1.png, "Genaxis Theatre"\r\nword_2.png, "say \\"no, thanks\\""\r\n'
    put(tmp_path, {"gt.txt": text, "word_1.png": png(), "word_2.png": png()})
    done = convert("icdar2015", tmp_path, tmp_path, split="train")
    assert done.answers == {
        "train-word_1.png": ["Genaxis Theatre"],
        "train-word_2.png": ['say "no, thanks"'],
    }


def test_icdar2015_cut_off(fails, tmp_path):
    put(tmp_path, {"gt.txt": 'word_1.png, "Gen', "word_1.png": png()})
    assert "gt.txt:1 is corrupt or cut off" in fails("icdar2015", tmp_path, tmp_path, split="train")


def test_sroie_asks_for_each_field(convert, tmp_path):
    entities = {"company": "TAN WOON YANN", "date": "25/12/2018", "address": "", "total": "9.00"}
    files = {"test/entities/X001.txt": json.dumps(entities), "test/img/X001.jpg": png()}
    put(tmp_path, files)
    done = convert("sroie", tmp_path, tmp_path / "test")
    assert done.answers == {
        "test-X001-company": ["TAN WOON YANN"],
        "test-X001-date": ["25/12/2018"],
        "test-X001-total": ["9.00"],
    }
    assert done.reasons == {"the receipt has no address": 1}


def test_sroie_cut_off(fails, tmp_path):
    put(tmp_path, {"entities/X001.txt": '{"company": "TAN', "img/X001.jpg": png()})
    assert "X001.txt is corrupt or cut off" in fails("sroie", tmp_path, tmp_path)
