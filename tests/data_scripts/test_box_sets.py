"""Converters for boxes, RefCOCO's apart, on fixtures in their datasets' layouts."""

from __future__ import annotations

import datasets
import pytest
from dataset_files import png, put, put_table


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


def ref_l4(number: str, **more: object) -> dict:
    row = {"id": number, "caption": f"thing {number}", "bbox": [10.0, 5.0, 20.0, 30.0]}
    row |= {"file_name": "a.jpg", "ori_category_id": "o365_1", "is_rewrite": False}
    return row | {"height": 48, "width": 64} | more


def test_ref_l4_is_val_and_test_together(convert, tmp_path):
    put_table(tmp_path / "ref-l4-val.parquet", [ref_l4("000001")])
    put_table(tmp_path / "ref-l4-test.parquet", [ref_l4("000002")])
    put(tmp_path / "images", {"a.jpg": png()})
    done = convert("ref_l4", tmp_path, tmp_path / "images")
    # x 10 + width 20, y 5 + height 30.
    box = [10.0, 5.0, 30.0, 35.0]
    assert {name: answer["boxes"] for name, answer in done.answers.items()} == {
        "val-000001": [box],
        "test-000002": [box],
    }
    assert done.rows[1]["meta"] == {"split": "test", "category": "o365_1"}


def test_ref_l4_without_its_columns_is_named(fails, tmp_path):
    put_table(tmp_path / "ref-l4-val.parquet", [{"id": "1", "bbox": [1, 2, 3, 4]}])
    message = fails("ref_l4", tmp_path, tmp_path / "images", split="val")
    assert "has no column caption, file_name; it has id, bbox" in message


def test_reason_seg_takes_the_hull_of_the_targets(convert, tmp_path):
    shapes = [
        {"label": "target", "points": [[10, 5], [20.5, 5], [15, 30]]},
        {"label": "target", "points": [[30, 10], [40, 12], [35, 40]]},
        {"label": "ignore", "points": [[0, 0], [60, 0], [60, 45]]},
    ]
    entry = {"text": ["who drinks?", "the guest’s cup"], "is_sentence": True, "shapes": shapes}
    nothing = {"text": ["?"], "is_sentence": False, "shapes": shapes[2:]}
    files = {"val/1.json": entry, "val/1.jpg": png(), "val/2.json": nothing, "val/2.jpg": png()}
    put(tmp_path, files)
    done = convert("reason_seg", tmp_path, tmp_path, split="val")
    assert [row["answer"]["boxes"] for row in done.rows] == [[[10, 5, 40, 40]]] * 2
    assert [row["images"] for row in done.rows] == [["val/1.jpg"]] * 2
    assert done.reasons == {"it has no target": 1}


def test_reason_seg_files_in_windows_encoding(convert, tmp_path):
    text = '{"text": ["the guest’s cup"], "is_sentence": false, "shapes": [{"label": "target", '
    text += '"points": [[1, 2], [3, 4]]}]}'
    put(tmp_path, {"1.json": text.encode("cp1252"), "1.jpg": png()})
    done = convert("reason_seg", tmp_path, tmp_path)
    assert done.rows[0]["question"] == "the guest’s cup"


def test_ovdeval_asks_for_an_images_own_labels(convert, tmp_path):
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
    put(tmp_path, {"color.json": content, "images/1.jpg": png(), "images/2.jpg": png()})
    done = convert("ovdeval", tmp_path / "color.json", tmp_path / "images")
    assert [row["question"] for row in done.rows] == [
        "a red cup, a blue cup",
        "a red cup, a blue cup, a fork",
    ]
    assert done.answers["color-1"] == {"boxes": [[10, 5, 30, 35]], "labels": ["a red cup"]}
    assert done.rows[0]["meta"]["part"] == "color"


def test_visual_genome_finds_images_in_both_folders(convert, tmp_path):
    region = {"image_id": 1, "x": 10, "y": 5, "width": 20, "height": 30}
    entries = [
        {"id": 1, "regions": [region | {"region_id": 11, "phrase": "a cup "}]},
        {"id": 2, "regions": [region | {"region_id": 12, "phrase": "a hat", "width": 90}]},
        {"id": 3, "regions": [region | {"region_id": 13, "phrase": "a dog"}]},
    ]
    images = {"images/VG_100K/1.jpg": png(), "images/VG_100K_2/2.jpg": png()}
    put(tmp_path, {"region_descriptions.json": entries} | images)
    put(tmp_path, {"images/VG_100K_2/3.jpg": png()})
    done = convert("visual_genome", tmp_path, tmp_path / "images")
    assert done.answers["train-11"] == {"boxes": [[10, 5, 30, 35]], "labels": ["a cup"]}
    assert done.rows[1]["images"] == ["VG_100K_2/3.jpg"]
    assert done.reasons == {"a box leaves its image": 1}  # 10 + 90 in an image 64 wide


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
    put(tmp_path, files | {"flickr30k-images/100.jpg": png()})
    done = convert("flickr30k", tmp_path, tmp_path / "flickr30k-images", split="val")
    assert [(row["question"], row["answer"]["boxes"][0]) for row in done.rows] == [
        ("Two men", [10, 5, 40, 40]),
        ("a hat", [30, 8, 40, 40]),
        ("Men", [10, 5, 40, 40]),
    ]
    assert done.rows[0]["meta"]["boxes"] == [[10, 5, 20, 15], [30, 8, 40, 40]]
    assert done.rows[1]["meta"]["kind"] == "clothing"
    assert done.reasons == {"its phrase has no box": 1}


def test_flickr30k_cut_off_annotation(fails, tmp_path):
    files = {"val.txt": "100", "Sentences/100.txt": "[/EN#1/people Men] .", "flickr/100.jpg": png()}
    put(tmp_path, files | {"Annotations/100.xml": FLICKR_XML[:90]})
    assert "100.xml is corrupt or cut off" in fails("flickr30k", tmp_path, tmp_path / "flickr")


def test_any_table_by_its_usual_columns(convert, tmp_path):
    image = {"bytes": png(), "path": None}
    rows = [
        {"id": 7, "images": [image, image], "problem": "How many?", "solution": "3", "kind": "x"},
        {"id": 8, "images": [image], "problem": "How many?", "solution": "some", "kind": "x"},
    ]
    put_table(tmp_path / "hub" / "train-0.parquet", rows)
    done = convert("table", tmp_path / "hub", tmp_path / "images", task="counting")
    assert done.answers == {"train-7": 3}
    assert done.rows[0]["meta"] == {"kind": "x"}
    assert len(done.examples[0].images) == 2
    assert done.reasons == {"its answer is none of counting": 1}


def test_any_table_without_an_answer_is_named(fails, tmp_path):
    put_table(tmp_path / "train.parquet", [{"image": {"bytes": png()}, "question": "?"}])
    message = fails("table", tmp_path / "train.parquet", tmp_path / "images", task="ocr")
    assert "one column of answer, answers, solution, label; its columns are image, question" in (
        message
    )


def test_a_saved_dataset_is_read_by_name(convert, tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [png()], "question": ["What?"], "answer": ["EXIT"]}
    ).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    done = convert("table", f"hf:{tmp_path / 'saved'}", tmp_path / "images", task="ocr")
    assert done.answers == {"train-0": "EXIT"}
