"""Tests of the box converters (except RefCOCO) on small files in the published layouts."""

from __future__ import annotations

import pytest
from dataset_files import png, write_files, write_table


def make_turns(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def test_vlm_r1_conversations_with_one_and_several_images(convert, tmp_path):
    prompt = "Please provide the bounding box coordinate of the region this sentence describes: "
    rows = [
        {
            "id": 1,
            "image": "a.png",
            "conversations": make_turns(f"<image>{prompt}cup", "[1, 2, 30, 40]"),
        },
        {
            "image": ["a.png", "b.png"],
            "conversations": make_turns("<image><image>Same?", "[0,0,5,5]"),
        },
        {"id": 3, "image": "a.png", "conversations": make_turns("<image>Why?", "because")},
    ]
    write_files(tmp_path, {"rec.jsonl": rows, "images/a.png": png(), "images/b.png": png()})
    result = convert("vlm_r1", tmp_path / "rec.jsonl", tmp_path / "images")
    assert result.answers == {
        "train-1": {"boxes": [[1, 2, 30, 40]]},
        "train-2": {"boxes": [[0, 0, 5, 5]]},
    }
    assert [row["question"] for row in result.rows] == ["cup", "Same?"]
    assert [len(example.images) for example in result.examples] == [1, 2]
    assert result.reasons == {"its answer is not valid for grounding": 1}


def test_vlm_r1_evaluation_file(convert, tmp_path):
    row = {"image": "a.png", "problem": "the cup", "solution": [1, 2, 30, 40]}
    write_files(tmp_path, {"lisa_test.json": [row | {"dataset_name": "lisa"}], "a.png": png()})
    result = convert("vlm_r1", tmp_path / "lisa_test.json", tmp_path, split="test")
    assert result.answers == {"test-1": {"boxes": [[1, 2, 30, 40]]}}
    assert result.rows[0]["meta"] == {"dataset_name": "lisa"}


@pytest.mark.parametrize(
    ("task", "value", "answer"), [("counting", "3", 3), ("ocr", "EXIT", "EXIT")]
)
def test_vlm_r1_rows_for_other_tasks(convert, tmp_path, task, value, answer):
    row = {
        "id": 1,
        "image": "a.png",
        "conversations": make_turns("<image>?", f"<answer>{value}</answer>"),
    }
    write_files(tmp_path, {"other.jsonl": [row], "a.png": png()})
    result = convert("vlm_r1", tmp_path / "other.jsonl", tmp_path, task=task)
    assert result.answers == {"train-1": answer}


COCO = {
    "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}],
    "annotations": [
        {"id": 5, "image_id": 1, "category_id": 3, "bbox": [10, 20, 30, 15.5], "iscrowd": 0},
        {"id": 6, "image_id": 1, "category_id": 1, "bbox": [0, 0, 60, 40], "iscrowd": 1},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
}
COCO_IMAGES = {"val2017/1.jpg": png(), "val2017/2.jpg": png()}


def test_coco_questions_name_every_category(convert, tmp_path):
    write_files(tmp_path, {"annotations/instances_val2017.json": COCO} | COCO_IMAGES)
    result = convert("coco_detection", tmp_path, tmp_path / "val2017")
    assert {row["question"] for row in result.rows} == {"person, car"}
    # x 10 + width 30, y 20 + height 15.5; the crowd region is left out; image 2 has no objects.
    assert result.answers == {
        "val-1": {"boxes": [[10, 20, 40, 35.5]], "labels": ["car"]},
        "val-2": {"boxes": [], "labels": []},
    }
    assert [row["meta"]["crowds"] for row in result.rows] == [1, 0]
    crowd = {"boxes": [[0, 0, 60, 40]], "labels": ["person"]}
    assert [row["meta"]["crowd"] for row in result.rows] == [crowd, None]


def test_a_coco_file_without_its_lists_is_an_error(convert_with_error, tmp_path):
    write_files(tmp_path, {"ann.json": {"images": []}})
    message = convert_with_error("coco_detection", tmp_path / "ann.json", tmp_path / "images")
    assert "not a COCO annotation file: it has no annotations, categories" in message


def test_a_part_of_coco_is_an_error_but_not_another_dataset_of_the_same_name(
    convert, convert_with_error, tmp_path
):
    name, categories = "instances_val2017.json", [{"id": i, "name": str(i)} for i in range(80)]
    write_files(tmp_path, {name: COCO | {"categories": categories}} | COCO_IMAGES)
    error = convert_with_error("coco_detection", tmp_path, tmp_path / "val2017")
    assert f"not the published number of images (first: {name}: 2 instead of 5,000)" in error
    write_files(tmp_path, {name: COCO})
    assert len(convert("coco_detection", tmp_path, tmp_path / "val2017").rows) == 2


def test_coco_annotations_of_one_id_are_all_kept_and_images_of_one_id_an_error(
    convert, convert_with_error, tmp_path
):
    twins = [{**COCO["annotations"][0], "bbox": [0, 0, side, side]} for side in (5, 9)]
    write_files(tmp_path, {"ann.json": COCO | {"annotations": twins}} | COCO_IMAGES)
    result = convert("coco_detection", tmp_path / "ann.json", tmp_path / "val2017")
    assert result.answers["val-1"]["boxes"] == [[0, 0, 5, 5], [0, 0, 9, 9]]
    write_files(tmp_path, {"twins.json": COCO | {"images": [COCO["images"][0]] * 2}})
    assert "twins.json: images, entry 2: its id 1 is a duplicate of entry 1" in convert_with_error(
        "coco_detection", tmp_path / "twins.json", tmp_path / "val2017"
    )


def make_ref_l4_row(number: str, **more: object) -> dict:
    row = {"id": number, "caption": f"thing {number}", "bbox": [10.0, 5.0, 20.0, 30.0]}
    row |= {"file_name": "a.jpg", "ori_category_id": "o365_1", "is_rewrite": False}
    return row | {"height": 48, "width": 64} | more


def test_ref_l4_reads_val_and_test_together(convert, tmp_path):
    write_table(tmp_path / "ref-l4-val.parquet", [make_ref_l4_row("000001")])
    write_table(tmp_path / "ref-l4-test.parquet", [make_ref_l4_row("000002")])
    write_files(tmp_path / "images", {"a.jpg": png()})
    result = convert("ref_l4", tmp_path, tmp_path / "images")
    # x 10 + width 20, y 5 + height 30.
    box = [10.0, 5.0, 30.0, 35.0]
    assert {name: answer["boxes"] for name, answer in result.answers.items()} == {
        "val-000001": [box],
        "test-000002": [box],
    }
    assert result.rows[1]["meta"] == {"split": "test", "category": "o365_1"}


def test_ref_l4_without_its_columns_is_an_error(convert_with_error, tmp_path):
    write_table(tmp_path / "ref-l4-val.parquet", [{"id": "1", "bbox": [1, 2, 3, 4]}])
    message = convert_with_error("ref_l4", tmp_path, tmp_path / "images", split="val")
    assert "has no column caption, file_name; it has id, bbox" in message


def test_reason_seg_returns_the_box_around_all_targets(convert, tmp_path):
    shapes = [
        {"label": "target", "points": [[10, 5], [20.5, 5], [15, 30]]},
        {"label": "target", "points": [[30, 10], [40, 12], [35, 40]]},
        {"label": "ignore", "points": [[0, 0], [60, 0], [60, 45]]},
    ]
    entry = {"text": ["who drinks?", "the guest’s cup"], "is_sentence": True, "shapes": shapes}
    nothing = {"text": ["?"], "is_sentence": False, "shapes": shapes[2:]}
    files = {"val/1.json": entry, "val/1.jpg": png(), "val/2.json": nothing, "val/2.jpg": png()}
    write_files(tmp_path, files)
    result = convert("reason_seg", tmp_path, tmp_path, split="val")
    assert [row["answer"]["boxes"] for row in result.rows] == [[[10, 5, 40, 40]]] * 2
    assert [row["images"] for row in result.rows] == [["val/1.jpg"]] * 2
    assert result.reasons == {"it has no target": 1, "not the published number of images": 1}
    assert "val: 2 instead of 200)" in result.output


def test_reason_seg_reads_files_in_windows_encoding(convert, tmp_path):
    text = '{"text": ["the guest’s cup"], "is_sentence": false, "shapes": [{"label": "target", '
    text += '"points": [[1, 2], [3, 4]]}]}'
    write_files(tmp_path, {"1.json": text.encode("cp1252"), "1.jpg": png()})
    result = convert("reason_seg", tmp_path, tmp_path)
    assert result.rows[0]["question"] == "the guest’s cup"


def test_ovdeval_questions_name_the_labels_of_the_image(convert, tmp_path):
    content = {
        "images": [
            {"id": 1, "file_name": "1.jpg", "text": ["a red cup"], "neg_text": ["a blue cup"]},
            {"id": 2, "file_name": "2.jpg"},
        ],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 0, "bbox": [10, 5, 20, 30]}],
        "categories": [
            {"id": number, "name": name}
            for number, name in enumerate(["a red cup", "a blue cup", "a fork"])
        ],
    }
    write_files(tmp_path, {"color.json": content, "images/1.jpg": png(), "images/2.jpg": png()})
    result = convert("ovdeval", tmp_path / "color.json", tmp_path / "images")
    assert [row["question"] for row in result.rows] == [
        "a red cup, a blue cup",
        "a red cup, a blue cup, a fork",
    ]
    assert result.answers["color-1"] == {"boxes": [[10, 5, 30, 35]], "labels": ["a red cup"]}
    assert result.rows[0]["meta"]["part"] == "color"


def test_visual_genome_finds_images_in_both_folders(convert, tmp_path):
    region = {"image_id": 1, "x": 10, "y": 5, "width": 20, "height": 30}
    entries = [
        {"id": 1, "regions": [region | {"region_id": 11, "phrase": "a cup "}]},
        {"id": 2, "regions": [region | {"region_id": 12, "phrase": "a hat", "width": 90}]},
        {"id": 3, "regions": [region | {"region_id": 13, "phrase": "a dog"}]},
    ]
    images = {"images/VG_100K/1.jpg": png(), "images/VG_100K_2/2.jpg": png()}
    write_files(tmp_path, {"region_descriptions.json": entries} | images)
    write_files(tmp_path, {"images/VG_100K_2/3.jpg": png()})
    result = convert("visual_genome", tmp_path, tmp_path / "images")
    assert result.answers["train-11"] == {"boxes": [[10, 5, 30, 35]], "labels": ["a cup"]}
    assert result.rows[1]["images"] == ["VG_100K_2/3.jpg"]
    assert result.reasons == {"a box extends beyond its image": 1}  # 10 + 90 in an image 64 wide


FLICKR_XML = """<annotation><filename>100.jpg</filename>
<size><width>64</width><height>48</height><depth>3</depth></size>
<object><name>1</name><bndbox>
<xmin>10</xmin><ymin>5</ymin><xmax>20</xmax><ymax>15</ymax></bndbox></object>
<object><name>1</name><name>2</name><bndbox>
<xmin>30</xmin><ymin>8</ymin><xmax>40</xmax><ymax>40</ymax></bndbox></object>
<object><name>0</name><scene>1</scene><nobndbox>1</nobndbox></object></annotation>"""


def test_flickr30k_merges_the_boxes_of_a_phrase(convert, tmp_path):
    sentences = (
        "[/EN#1/people Two men] wear [/EN#2/clothing/other a hat] in [/EN#0/scene a field] .\n"
    )
    sentences += "[/EN#1/people Men] stand .\n"
    files = {"val.txt": "100\n", "Sentences/100.txt": sentences, "Annotations/100.xml": FLICKR_XML}
    write_files(tmp_path, files | {"flickr30k-images/100.jpg": png()})
    result = convert("flickr30k", tmp_path, tmp_path / "flickr30k-images", split="val")
    assert [(row["question"], row["answer"]["boxes"][0]) for row in result.rows] == [
        ("Two men", [10, 5, 40, 40]),
        ("a hat", [30, 8, 40, 40]),
        ("Men", [10, 5, 40, 40]),
    ]
    assert result.rows[0]["meta"]["boxes"] == [[10, 5, 20, 15], [30, 8, 40, 40]]
    assert result.rows[1]["meta"]["kind"] == "clothing"
    assert result.reasons == {"its phrase has no box": 1, "not the published number of images": 1}
    assert "(first: val.txt: 1 instead of 1,000)" in result.output
