"""Tests of the RefCOCO converters: boxes, sentences, splits and corrupt files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from dataset_files import png, write_files, write_table

INSTANCES = {
    "images": [
        {"id": 7, "file_name": "COCO_train2014_000000000007.jpg", "width": 64, "height": 48}
    ],
    "annotations": [
        {"id": 70, "image_id": 7, "category_id": 1, "bbox": [10.5, 5.0, 20.0, 30.25]},
        {"id": 71, "image_id": 7, "category_id": 1, "bbox": [0.0, 0.0, 64.0, 48.0]},
    ],
    "categories": [{"id": 1, "name": "person"}],
}


def make_ref(number: int, annotation: int, split: str, *sentences: str) -> dict:
    return {
        "ref_id": number,
        "ann_id": annotation,
        "image_id": 7,
        "category_id": 1,
        "split": split,
        # In the published files the region's number is appended to the image's name.
        "file_name": f"COCO_train2014_000000000007_{number}.jpg",
        "sent_ids": [10 * number + i for i in range(len(sentences))],
        "sentences": [
            {"sent_id": 10 * number + i, "sent": text, "raw": text, "tokens": text.split()}
            for i, text in enumerate(sentences)
        ],
    }


REFS = [
    make_ref(1, 70, "val", "man on the left", "left guy"),
    make_ref(2, 71, "train", "everything"),
    make_ref(3, 71, "testAB", "all of it"),
    make_ref(4, 70, "testA", "him"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Python 2 wrote the published pickles, in protocols up to 2.
    files = {"refs(unc).p": pickle.dumps(REFS, protocol=2), "instances.json": INSTANCES}
    return write_files(tmp_path / "refcoco", files)


@pytest.fixture
def train2014(tmp_path: Path) -> Path:
    return write_files(tmp_path / "train2014", {"COCO_train2014_000000000007.jpg": png()})


def test_each_sentence_is_a_question_and_xywh_becomes_xyxy(convert, folder, train2014):
    result = convert("refcoco", folder, train2014, split="val")
    assert [row["question"] for row in result.rows] == ["man on the left", "left guy"]
    # x 10.5 + width 20, y 5 + height 30.25; read as xyxy, the box would end at 20, 30.25.
    assert [row["answer"]["boxes"] for row in result.rows] == [[[10.5, 5.0, 30.5, 35.25]]] * 2
    assert result.rows[0]["images"] == ["COCO_train2014_000000000007.jpg"]
    assert result.rows[0]["meta"]["category"] == "person"
    assert len(result.examples) == 2
    assert "rows read 2, written 2, refused 0" in result.output


def test_the_test_splits_overlap_as_in_refer(convert, folder, train2014):
    result = convert("refcoco", folder, train2014, split="testA")
    assert [row["question"] for row in result.rows] == ["all of it", "him"]


def test_a_missing_image_is_counted_and_reported(convert, folder, train2014):
    other = {**INSTANCES["images"][0], "id": 8, "file_name": "gone.jpg"}
    write_files(folder, {"instances.json": {**INSTANCES, "images": [*INSTANCES["images"], other]}})
    refs = [*REFS, {**make_ref(5, 71, "val", "lost"), "image_id": 8}]
    write_files(folder, {"refs(unc).p": pickle.dumps(refs, protocol=2)})
    result = convert("refcoco", folder, train2014, split="val")
    assert result.reasons == {"its image cannot be used": 1}
    assert "image gone.jpg is missing" in result.output
    assert "rows read 3, written 2, refused 1" in result.output


class Attack:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_that_refers_to_code_is_an_error(convert_with_error, folder, train2014, capsys):
    write_files(folder, {"refs(unc).p": pickle.dumps([Attack()])})
    message = convert_with_error("refcoco", folder, train2014)
    assert "builtins.print; only plain data is allowed" in message
    assert "code ran" not in capsys.readouterr().out + message


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_a_truncated_pickle_is_one_message(convert_with_error, folder, train2014, fraction):
    content = (folder / "refs(unc).p").read_bytes()
    write_files(folder, {"refs(unc).p": content[: int(len(content) * fraction)]})
    message = convert_with_error("refcoco", folder, train2014)
    assert message.startswith("error: ")
    assert "refs(unc).p is corrupt, truncated or not a pickle of plain data" in message
    assert message.count("\n") == 1


def test_a_split_without_regions_is_an_error(convert_with_error, folder, train2014):
    assert "no regions of split test" in convert_with_error(
        "refcoco", folder, train2014, split="test"
    )


LMMS = {
    "question_id": "0",
    "image": {"bytes": png(), "path": None},
    "question": "Please carefully observe the area circled in the image and caption it.",
    "answer": ["the red cup", "cup at right"],
    "segmentation": [1.0, 2.0],
    "bbox": [10.0, 5.0, 20.0, 30.0],
    "iscrowd": 0,
    "file_name": "COCO_train2014_000000000007_0.jpg",
}


def test_lmms_lab_answers_are_separate_questions_about_one_image(convert, tmp_path):
    write_table(tmp_path / "hub" / "data" / "val-00000-of-00001.parquet", [LMMS])
    result = convert("refcoco_hub", tmp_path / "hub", tmp_path / "images")
    assert [row["question"] for row in result.rows] == ["the red cup", "cup at right"]
    assert [row["answer"]["boxes"][0] for row in result.rows] == [[10.0, 5.0, 30.0, 35.0]] * 2
    assert len({row["images"][0] for row in result.rows}) == 1, "the same bytes are one file"
    assert result.examples[0].images[0].load().size == (64, 48)


def make_jxu124_row(box: list[float]) -> dict:
    return {
        "ref_id": 1,
        "image_id": 7,
        "split": "val",
        "sentences": REFS[0]["sentences"],
        "raw_anns": '{"bbox": [10.5, 5.0, 20.0, 30.25], "id": 70}',
        "raw_image_info": '{"file_name": "COCO_train2014_000000000007.jpg"}',
        "image_path": "coco/train2014/COCO_train2014_000000000007.jpg",
        "bbox": box,
    }


def test_jxu124_boxes_are_xyxy_and_checked_against_the_annotation(convert, tmp_path, train2014):
    rows = [
        make_jxu124_row([10.5, 5.0, 30.5, 35.25]),
        {**make_jxu124_row([10.5, 5.0, 20.0, 30.25]), "ref_id": 2},
    ]
    source = write_table(tmp_path / "validation.parquet", rows)
    result = convert("refcoco_hub", source, train2014, split="validation")
    assert [row["answer"]["boxes"][0] for row in result.rows] == [[10.5, 5.0, 30.5, 35.25]] * 2
    assert result.reasons == {"its bbox differs from its annotation": 2}


def test_an_unknown_table_is_an_error(convert_with_error, tmp_path):
    source = write_table(tmp_path / "val.parquet", [{"bbox": [1, 2, 3, 4], "text": "x"}])
    message = convert_with_error("refcoco_hub", source, tmp_path / "images")
    assert "neither lmms-lab's nor jxu124's RefCOCO: its columns are bbox, text" in message
