"""Converters for boxes, RefCOCO's apart, on fixtures in their datasets' layouts."""

from __future__ import annotations

import pytest
from dataset_files import png, put


def turns(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def test_vlm_r1_conversations_with_one_and_several_images(convert, tmp_path):
    asked = "Please provide the bounding box coordinate of the region this sentence describes: "
    rows = [
        {"id": 1, "image": "a.png", "conversations": turns(f"<image>{asked}cup", "[1, 2, 30, 40]")},
        {"image": ["a.png", "b.png"], "conversations": turns("<image><image>Same?", "[0,0,5,5]")},
        {"id": 3, "image": "a.png", "conversations": turns("<image>Why?", "because")},
    ]
    put(tmp_path, {"rec.jsonl": rows, "images/a.png": png(), "images/b.png": png()})
    done = convert("vlm_r1", tmp_path / "rec.jsonl", tmp_path / "images")
    assert done.answers == {
        "train-1": {"boxes": [[1, 2, 30, 40]]},
        "train-2": {"boxes": [[0, 0, 5, 5]]},
    }
    assert [row["question"] for row in done.rows] == ["cup", "Same?"]
    assert [len(example.images) for example in done.examples] == [1, 2]
    assert done.reasons == {"its answer is none of grounding": 1}


def test_vlm_r1_evaluation_file(convert, tmp_path):
    row = {"image": "a.png", "problem": "the cup", "solution": [1, 2, 30, 40]}
    put(tmp_path, {"lisa_test.json": [row | {"dataset_name": "lisa"}], "a.png": png()})
    done = convert("vlm_r1", tmp_path / "lisa_test.json", tmp_path, split="test")
    assert done.answers == {"test-1": {"boxes": [[1, 2, 30, 40]]}}
    assert done.rows[0]["meta"] == {"dataset_name": "lisa"}


@pytest.mark.parametrize(
    ("task", "value", "answer"), [("counting", "3", 3), ("ocr", "EXIT", "EXIT")]
)
def test_vlm_r1_of_other_tasks(convert, tmp_path, task, value, answer):
    row = {
        "id": 1,
        "image": "a.png",
        "conversations": turns("<image>?", f"<answer>{value}</answer>"),
    }
    put(tmp_path, {"other.jsonl": [row], "a.png": png()})
    done = convert("vlm_r1", tmp_path / "other.jsonl", tmp_path, task=task)
    assert done.answers == {"train-1": answer}


def test_a_cut_off_jsonl_gives_one_message_and_no_output(fails, tmp_path):
    good = '{"id": 1, "image": "a.png", "problem": "x", "solution": [1, 2, 3, 4]}\n'
    put(tmp_path, {"rec.jsonl": good * 2 + good[:30], "a.png": png()})
    message = fails("vlm_r1", tmp_path / "rec.jsonl", tmp_path)
    assert "rec.jsonl is corrupt or cut off" in message
    assert "rec.jsonl:3" in message


COCO = {
    "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}],
    "annotations": [
        {"id": 5, "image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 15.5], "iscrowd": 0},
        {"id": 6, "image_id": 1, "category_id": 1, "bbox": [0, 0, 60, 40], "iscrowd": 1},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
}
COCO_IMAGES = {"val2017/1.jpg": png(), "val2017/2.jpg": png()}


def test_coco_asks_every_image_for_every_category(convert, tmp_path):
    put(tmp_path, {"annotations/instances_val2017.json": COCO} | COCO_IMAGES)
    done = convert("coco_detection", tmp_path, tmp_path / "val2017")
    assert {row["question"] for row in done.rows} == {"person, car"}
    # x 10 + width 30, y 20 + height 15.5; the crowd is no object to find; image 2 has none.
    assert done.answers == {
        "val-1": {"boxes": [[10, 20, 40, 35.5]], "labels": ["car"]},
        "val-2": {"boxes": [], "labels": []},
    }
    assert [row["meta"]["crowds"] for row in done.rows] == [1, 0]


def test_coco_file_without_its_lists_is_named(fails, tmp_path):
    put(tmp_path, {"ann.json": {"images": []}})
    message = fails("coco_detection", tmp_path / "ann.json", tmp_path / "images")
    assert "no COCO annotation file: it has no annotations, categories" in message


def test_coco_annotation_of_an_unknown_image_is_no_silent_loss(fails, tmp_path):
    stray = {"id": 7, "image_id": 9, "category_id": 1, "bbox": [0, 0, 5, 5]}
    put(tmp_path, {"ann.json": {**COCO, "annotations": [stray]}} | COCO_IMAGES)
    assert "KeyError: 9" in fails("coco_detection", tmp_path / "ann.json", tmp_path / "val2017")
