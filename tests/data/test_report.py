"""Checks of datasets: bad rows, unreadable images, boxes outside, and duplicates."""

from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from dataset_files import encode_image, make_row, photo, write_files
from PIL import Image

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.held_out import warn_about_shared_images
from vlm_grpo.data.report import DataReport, check_source
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef, VideoRef


def rows(*images: str, **fields: object) -> list[dict]:
    return [make_row(id=f"r{i}", images=[image], **fields) for i, image in enumerate(images)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"a.png": encode_image(photo(0)), "copy.bmp": encode_image(photo(0), "BMP")}
    files |= {"b.png": encode_image(photo(1)), "truncated.png": encode_image(photo(2))[:3000]}
    return write_files(tmp_path, files)


def check(path: Path, task: str = "counting") -> DataReport:
    """Check a source, without building prompts."""
    data = DataSettings(train=str(path))
    return check_source(str(path), load_task(task), data, lambda *_: (None, []))


def test_a_report_lists_every_kind_of_problem(folder):
    images = ("a.png", "copy.bmp", "b.png", "truncated.png", "gone.png")
    bad = {"id": "x", "question": "?", "answer": "many"}
    write_files(folder, {"train.jsonl": [*rows(*images), bad], "empty.jsonl": []})
    report = check(folder / "train.jsonl")
    assert len(report.examples) == 4
    gone, many = report.problems["bad rows"]
    assert gone.endswith(f": image gone.png is missing in {folder}")
    assert many.endswith(": the answer 'many' must be an integer of at least 0")
    # The header is intact, the pixels are not.
    (line,) = report.problems["unreadable images"]
    assert line.startswith(f"{folder / 'train.jsonl'}:4: example r3: image truncated.png cannot be")
    assert not report.passed
    text = "\n".join(report.describe())
    assert f"  - {folder / 'a.png'}, {folder / 'copy.bmp'}\n" in text
    assert "bad rows                     2" in text
    assert "3: 100.0%" in text
    assert "not checked without --model" in text
    assert not check(folder / "empty.jsonl").passed


def test_boxes_are_counted_and_may_end_half_a_pixel_outside(folder):
    answer = {"boxes": [[0, 0, 160.5, 120]]}
    write_files(folder, {"in.jsonl": rows("a.png", answer=answer, evidence=[[1, 1, 5, 5]])})
    report = check(folder / "in.jsonl", "grounding")
    assert report.passed
    text = "\n".join(report.describe())
    assert "boxes per row                1: 1" in text
    assert "evidence box side in pixels  5 %: 4, median 4" in text


def test_the_part_of_a_source_that_was_checked_is_named(tmp_path):
    rows = datasets.Dataset.from_list([{"question": "How many?", "answer": 1}] * 3)
    parts = datasets.DatasetDict({"train": rows, "validation": rows.select([0])})
    parts.save_to_disk(str(tmp_path / "saved"))
    first, *_ = check(tmp_path / "saved").describe()
    assert first.startswith(f"{tmp_path / 'saved'}, part eval (--split train: the other one): 1 g")
    write_files(tmp_path, {"t.jsonl": [{"question": "?", "answer": 1}]})
    first, *_ = check(tmp_path / "t.jsonl").describe()
    assert first.startswith(f"{tmp_path / 't.jsonl'}: 1 good")


def test_text_answers_are_described_and_lists_of_numbers_are_no_texts(folder):
    write_files(folder, {"t.jsonl": rows("a.png", "b.png", answer="cat")})
    text = "\n".join(check(folder / "t.jsonl", "ocr").describe())
    assert "characters per answer        3 to 3" in text
    assert "most frequent                'cat' 2" in text
    row = {"question": "?", "videos": ["clip"], "answer": [0, 1]}
    frames = {f"clip/{number}.png": encode_image(photo(0)) for number in range(8)}
    write_files(folder, {"t.jsonl": [row], **frames})
    report = check(folder / "t.jsonl", "temporal")
    assert report.passed
    assert not any("characters" in line for line in report.statistics)


def test_held_out_images_in_the_training_data_are_warned_about(tmp_path, caplog):
    def example(name: str, *images: ImageRef) -> Example:
        return Example(name, images, "?", 1)

    def clip(*names: str) -> Example:  # of frames that are not read
        frames = tuple(ImageRef(n, (8, 8), (8, 8), path=tmp_path / n) for n in names)
        return example("clip", VideoRef("", (8, 8), (8, 8), times=(0, 1), frames=frames))

    embedded = ImageRef("a", (8, 8), (8, 8), data=b"one")
    file = ImageRef("b", (8, 8), (8, 8), path=tmp_path / "b.png")
    train = [example("1", embedded), example("2", file), clip("gone", "lost")]
    different = ImageRef("c", (8, 8), (8, 8), data=b"two")
    others = [example("3", different), example("4"), clip("gone", "other")]
    warn_about_shared_images(train, others)
    assert not caplog.records
    same = replace(embedded, name="elsewhere")  # names do not matter
    shared = [example("5", same), example("6", file), clip("gone", "lost")]
    warn_about_shared_images(train, [*others, *shared])
    assert "3 of 6 held-out examples show an image that is also trained on" in caplog.text
    assert "(first: 5, 6, clip)" in caplog.text


def test_drawings_of_other_sizes_and_near_photos_are_no_duplicates(tmp_path):
    blank = {f"{w}.png": Image.new("RGB", (w, 9900 // w), "white") for w in (33, 300)}
    files = {name: encode_image(image) for name, image in blank.items()}
    files |= {"near.jpg": encode_image(photo(0), "JPEG"), "p.png": encode_image(photo(0))}
    write_files(tmp_path, {**files, "r.jsonl": rows(*files)})
    assert "duplicate images             0 in" in "\n".join(check(tmp_path / "r.jsonl").describe())
