"""Published formats are read without conversion."""

from pathlib import Path
from typing import Any

import pytest
from dataset_files import get_load_error, load, make_row, png, write_files, write_rows
from published_formats import BOXES, COCO, IMAGES, SAMPLES, make_tar, voc_xml, write_format
from video_files import make_video

from vlm_grpo.data.detection import CAPTION_QUESTION
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

EVERY, POINTING = (load_task(name, several=True) for name in ("grounding", "pointing"))


def describe(examples: list[Example]) -> list[tuple[Any, ...]]:
    """Return image, question and rounded answer of each example."""
    rows = []
    for example in examples:
        answer = example.answer
        if isinstance(answer, dict):
            answer = [tuple(round(edge, 2) for edge in box) for box in answer["boxes"]]
        rows.append((example.images[0].size, example.question, answer))
    return rows


@pytest.mark.parametrize("name", ["coco", "voc", "yolo"])
def test_a_task_asks_about_the_boxes_of_every_detection_format(tmp_path, name, caplog):
    source = write_format(tmp_path, name)
    (cup, *books), (large,) = ([box for _, box in BOXES[image]] for image in "ab")
    a, b = (64, 48), (40, 30)
    every = describe(load(source, EVERY))
    assert every == [(a, "cup", [cup]), (a, "book", books), (b, "cup", [large])]
    assert describe(load(source, POINTING)) == every
    assert describe(load(source, "grounding")) == [every[0], every[2]]  # which book is ambiguous
    text = 'How many instances of "{}" are in the image?'
    counts = [(size, text.format(name), len(boxes)) for size, name, boxes in every]
    assert describe(load(source)) == counts
    first, second = load(source, "detection")
    assert first.answer["labels"] == ["cup", "book", "book"]
    assert describe([first, second])[0][2] == [cup, *books]
    assert first.question == second.question
    names = ["book", "cup"] if name == "voc" else ["cup", "book", "cat"]  # VOC lists no classes
    assert first.question == ", ".join(names)
    assert not caplog.text


def write_coco(folder: Path, annotations: list[Any]) -> str:
    return write_format(folder, "coco", {"instances.json": COCO | {"annotations": annotations}})


def test_images_about_which_a_task_does_not_ask_are_counted(tmp_path, caplog):
    source = write_coco(tmp_path, COCO["annotations"][1:])
    (example,) = load(source, "grounding")
    assert (example.id, example.meta["image_id"]) == ("8-1", "8")
    assert "1 images give no row: Grounding asks about none of their objects" in caplog.text
    assert "OCR cannot ask about labeled boxes: define ask_about" in get_load_error(source, "ocr")


def test_a_crowd_is_no_answer(tmp_path):
    first, second, third, fourth = COCO["annotations"]
    source = write_coco(tmp_path, [first, second, third | {"iscrowd": 1}, fourth])
    assert [e.question for e in load(source, EVERY)] == ["cup", "cup"]
    first, _ = load(source, "detection")
    assert first.answer["labels"] == ["cup", "book"]
    assert first.meta["crowd"] == {"boxes": [[40, 8, 56, 20.5]], "labels": ["book"]}


def test_captions_of_an_image_are_accepted_answers(tmp_path):
    first, second = load(write_format(tmp_path, "captions"), "ocr")
    assert first.answer == ["A cup and two books.", "Books beside a cup."]
    assert (first.id, first.question) == ("7", CAPTION_QUESTION)
    assert (second.answer, second.images[0].size) == (["A cup."], (40, 30))


def test_coco_images_are_found_where_its_tools_place_them(tmp_path):
    for number, place in enumerate(("val2017", "images", "images/val2017")):
        files = {f"{number}/{place}/{name}.png": data for name, data in IMAGES.items()}
        source = f"{number}/annotations/instances_val2017.json"
        write_files(tmp_path, {source: COCO, **files})
        assert len(load(tmp_path / source, "detection")) == 2


def test_official_pascal_voc_counts_pixels_from_one_and_lists_its_splits(tmp_path):
    xml = voc_xml("a").replace("Unknown", "The VOC2007 Database")
    files = {"Annotations/a.xml": xml.replace("<difficult>0", "<difficult>1", 1)}
    files |= {"ImageSets/Main/train.txt": "a\n", "ImageSets/Main/val.txt": "b -1\n"}
    source = write_format(tmp_path, "voc", files)
    (train,) = load(source, "detection")
    assert train.answer["boxes"] == [[19, 7, 36, 20], [39, 7, 56, 20.5]]
    assert train.meta["crowd"] == {"boxes": [[3, 5, 14, 26]], "labels": ["cup"]}
    assert [e.images[0].name for e in load(source, "detection", "eval")] == ["b.png"]


@pytest.mark.parametrize(
    ("config", "prefix"),
    [
        ("train: ../train/images\nval: ../valid/images\nnames: {0: cup, 1: book}", "{}/images/"),
        ("train: images/train\nval: [images/valid]\nnames: [cup, book]", "images/{}/"),
        ("path: ../nowhere\ntrain: train.txt\nval: valid.txt\nnames: [cup, book]", "images/{}/"),
    ],
    ids=["Roboflow", "Ultralytics", "lists"],
)
def test_yolo_splits_are_read(tmp_path, config, prefix):
    files: dict[str, Any] = {"data.yaml": config}
    for split, name in (("train", "a"), ("valid", "b")):
        path = f"{prefix.format(split)}{name}"
        files |= {f"{path}.png": IMAGES[name], f"{split}.txt": f"./images/{split}/{name}.png\n"}
        files[f"{path.replace('images', 'labels')}.txt"] = "0 .5 .5 .5 .5\n"
    write_files(tmp_path, files)
    for source in (tmp_path / "data.yaml", tmp_path):
        (train,) = load(source, "grounding")
        (held_out,) = load(source, "grounding", "eval")
        assert (train.images[0].size, held_out.images[0].size) == ((64, 48), (40, 30))
        assert train.answer == {"boxes": [[16, 12, 48, 36]]}


def test_yolo_polygons_and_keypoints_are_read_as_boxes(tmp_path):
    polygon = {"labels/a.txt": "0 .25 .25 .75 .5 .5 .75\n", "labels/b.txt": None}
    source = write_format(tmp_path / "a", "yolo", polygon)
    assert load(source, "grounding")[0].answer == {"boxes": [[16, 12, 48, 36]]}
    (row,) = load(source, "segmentation")
    assert row.answer == {"boxes": [[16, 12, 48, 36]], "masks": [[[16, 12, 48, 24, 32, 36]]]}
    keypoints = {"labels/a.txt": "0 .5 .5 .5 .5 .1 .1 2\n", "labels/b.txt": None}
    config = "kpt_shape: [1, 3]\ntrain: images\nnames: [cup]\n"
    source = write_format(tmp_path / "b", "yolo", {**keypoints, "data.yaml": config})
    for task in ("grounding", "segmentation"):
        assert load(source, task)[0].answer == {"boxes": [[16, 12, 48, 36]]}


def test_masks_of_coco_are_those_of_the_objects_of_a_kind(tmp_path):
    cup, *books, _ = COCO["annotations"]
    polygon, runs = [[4, 6, 14, 6, 14, 26]], {"size": [48, 64], "counts": [0, 480, 2592]}
    cup, books[0] = cup | {"segmentation": polygon}, books[0] | {"segmentation": runs}
    files = {"a.json": COCO | {"annotations": [cup, *books]}, "a.png": png(64, 48)}
    write_files(tmp_path, files | {"b.png": png(40, 30)})
    answers = [row.answer for row in load(tmp_path / "a.json", "segmentation")]
    boxes = [[list(box) for _, box in BOXES["a"][part]] for part in (slice(1), slice(1, 3))]
    # One of the books has no mask, so that what is a book is not fully known.
    assert answers == [{"boxes": boxes[0], "masks": [polygon]}, {"boxes": boxes[1]}]
    books[1] = books[1] | {"segmentation": runs}
    write_files(tmp_path, {"a.json": COCO | {"annotations": [cup, *books]}})
    assert load(tmp_path / "a.json", "segmentation")[1].answer["masks"] == [runs, runs]


def test_image_folders_are_read(tmp_path):
    source = write_format(tmp_path / "metadata", "metadata")
    expected = [(size, "How many cups?", 1) for size in ((64, 48), (40, 30))]
    assert describe(load(source)) == expected
    for split, name in (("train", "b"), ("test", "a")):
        files = {f"{split}/cup/{name}.png": IMAGES[name], f"{split}/book/a.png": IMAGES["a"]}
        write_files(tmp_path / "classes", files)
    asked: dict[str, Any] = {"default_question": "Cup or book?"}
    assert {e.question for e in load(source, **asked)} == {"How many cups?"}
    asked["columns"] = {"answer": "label"}
    folder = f"hf:{tmp_path / 'classes'}"
    first, second = load(folder, "ocr", **asked)
    assert (first.question, first.answer, second.answer) == ("Cup or book?", "book", "cup")
    assert [e.images[0].size for e in (first, second)] == [(64, 48), (40, 30)]
    assert {e.images[0].size for e in load(folder, "ocr", "eval", **asked)} == {(64, 48)}


def test_samples_of_a_tar_file_are_read_without_keeping_their_images(tmp_path):
    first, second = load(write_format(tmp_path, "webdataset"))
    assert (first.id, first.question, first.answer) == ("shard-0/a", "How many cups?", 1)
    assert first.location == f"{tmp_path / 'shard-0.tar'}: sample a"
    assert not isinstance(first.images[0].data, bytes)
    assert [image.load().size for image in (*first.images, *second.images)] == [(64, 48), (40, 30)]
    data = (tmp_path / "shard-0.tar").read_bytes()
    for content in (b"", b"PK" * 99, data[:700]):
        (tmp_path / "shard-0.tar").write_bytes(content)
        message = get_load_error(str(tmp_path / "shard-0.tar"))
        assert f"data file {tmp_path / 'shard-0.tar'} cannot be read: " in message


def test_a_sample_without_json_is_answered_by_its_text(tmp_path):
    members = {
        "s-00.tar": make_tar({"x/1.jpg": IMAGES["a"], "x/1.txt": b"two books\n"}),
        "s-01.tar": make_tar({"2.0.png": IMAGES["a"], "2.1.png": IMAGES["b"], "2.cls": b"7"}),
    }
    caption, label = load(write_files(tmp_path, members) / "*.tar", "ocr")
    assert (caption.question, caption.answer) == (CAPTION_QUESTION, "two books")
    assert (label.answer, [image.size for image in label.images]) == ("7", [(64, 48), (40, 30)])


def test_clips_of_a_sample_are_its_videos(tmp_path):
    row = b'{"question": "How many?", "answer": 2, "video": "elsewhere.mp4"}'
    write_files(tmp_path, {"s.tar": make_tar({"x.mp4": make_video(), "x.json": row})})
    (example,) = load(tmp_path / "s.tar")
    (clip,) = example.images
    assert (clip.kind, clip.num_frames, clip.load().size) == ("video", 4, (4 * 64, 48))


def test_several_files_are_one_source_whose_rows_are_numbered_on(tmp_path):
    write_files(tmp_path, {f"s-0{number}.tar": make_tar(SAMPLES) for number in range(3)})
    for pattern in ("s-*.tar", "s-0[012].tar", "."):
        ids = [example.id for example in load(tmp_path / pattern)]
        assert ids == [f"s-0{number}/{n}" for number in range(3) for n in "ab"]
    write_files(tmp_path, {f"{n}.jsonl": [make_row(id=..., images=[])] * 2 for n in range(2)})
    assert [e.id for e in load(tmp_path / "*.jsonl")] == [f"row-{n}" for n in range(1, 5)]
    pattern = tmp_path / "2*.jsonl"
    assert get_load_error(str(pattern)) == f"there is no data file {pattern}"


def test_an_image_is_searched_in_the_image_root_and_beside_the_file(folder, tmp_path):
    write_files(tmp_path / "root", {"a.png": png(9, 9), "b.png": png(9, 9)})
    source = write_rows(folder, *(make_row(id=name, images=[f"{name}.png"]) for name in "ab"))
    root: dict[str, Any] = {"image_root": tmp_path / "root"}
    assert [e.images[0].size for e in load(source, **root)] == [(9, 9), (9, 9)]
    (tmp_path / "root/a.png").unlink()
    assert [e.images[0].size for e in load(source, **root)] == [(8, 6), (9, 9)]
    write_rows(folder, make_row(images=["c.png"]))
    message = get_load_error(source, **root)
    assert f"image c.png is missing in {tmp_path / 'root'} and in {folder}" in message


def test_a_folder_of_unknown_form_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    message = get_load_error(str(tmp_path))
    assert f"{tmp_path} is not a data source: give .jsonl" in message
    assert "of images and metadata" in message
    source = write_format(tmp_path, "yolo", {"data.yaml": None}).removesuffix("data.yaml")
    assert "does not name its classes: add a data.yaml" in get_load_error(source)
