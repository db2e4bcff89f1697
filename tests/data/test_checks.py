"""Checks of datasets: bad rows, unreadable images, boxes outside, and duplicates."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_files import encode_image, write_files
from PIL import Image

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data.checks import (
    check_source,
    find_duplicates,
    find_shared_images,
    format_overlap,
    format_report,
    hash_image,
    warn_about_shared_images,
)
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.registry import load_task
from vlm_grpo.types import Example, ImageRef


def photo(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return a smooth random image, like a photograph at a coarse scale."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def rows(*images: str, answer: object = 1) -> list[dict]:
    return [
        {"id": f"r{i}", "images": [image], "question": "?", "answer": answer}
        for i, image in enumerate(images)
    ]


def test_reencoded_and_resized_images_are_duplicates():
    first = photo(0)
    jpeg = Image.open(io.BytesIO(encode_image(first, "JPEG", quality=70)))
    smaller = first.resize((80, 60), Image.Resampling.LANCZOS)
    pictures = [first, photo(1), jpeg, photo(2), smaller]
    assert find_duplicates([hash_image(picture) for picture in pictures]) == [[0, 2, 4]]


def test_different_photographs_and_scenes_are_not_duplicates():
    scenes = [row.images[0].load() for row in make_shapes.draw_examples("counting", 300, seed=5)]
    hashes = [hash_image(picture) for picture in [*map(photo, range(300)), *scenes]]
    assert find_duplicates(hashes) == []


def test_images_that_differ_in_one_small_object_are_not_duplicates():
    scene = Image.new("RGB", (84, 84), "white")
    red, blue = scene.copy(), scene.copy()
    red.paste("red", (30, 30, 44, 44))
    blue.paste("blue", (30, 30, 44, 44))
    assert find_duplicates([hash_image(picture) for picture in (scene, red, blue)]) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "a.png": encode_image(photo(0)),
        "copy.jpg": encode_image(photo(0), "JPEG", quality=80),
        "b.png": encode_image(photo(1)),
        "truncated.png": encode_image(photo(2))[:3000],
    }
    return write_files(tmp_path, files)


def test_a_report_lists_every_kind_of_problem(folder):
    images = ("a.png", "copy.jpg", "b.png", "truncated.png", "gone.png")
    write_files(
        folder, {"train.jsonl": [*rows(*images), {"id": "x", "question": "?", "answer": "many"}]}
    )
    report = check_source(str(folder / "train.jsonl"), load_task("counting"))
    assert len(report.examples) == 4
    assert [line.partition(": ")[2] for line in report.bad_rows] == [
        f"image gone.png is missing in {folder}",
        "the answer 'many' must be an integer of at least 0",
    ]
    assert len(report.unreadable_images) == 1, "the header is intact, the pixels are not"
    assert "truncated.png" in report.unreadable_images[0]
    assert [[Path(name).name for name in group] for group in report.duplicates] == [
        ["a.png", "copy.jpg"]
    ]
    assert not report.passed
    text = "\n".join(format_report(report))
    assert "bad rows                     2" in text
    assert "1: 100.0%" in text


def test_boxes_outside_their_image_are_reported(folder):
    inside, outside = {"boxes": [[0, 0, 160.5, 120]]}, {"boxes": [[100, 20, 170, 40]]}
    write_files(folder, {"t.jsonl": rows("a.png", answer=inside)})
    assert check_source(str(folder / "t.jsonl"), load_task("grounding")).passed
    write_files(folder, {"t.jsonl": rows("a.png", answer=outside)})
    report = check_source(str(folder / "t.jsonl"), load_task("grounding"))
    assert report.boxes_outside == ["r0: [100.0, 20.0, 170.0, 40.0] in 160x120"]
    assert any("boxes per row                1: 1" in line for line in format_report(report))


def test_text_answers_are_described():
    report = check_source("embedded:ocr", load_task("ocr"))
    assert report.passed
    text = "\n".join(format_report(report))
    assert "characters per answer" in text
    assert "most frequent" in text


def test_image_tokens_are_counted():
    data = DataSettings(train="embedded:counting", eval="embedded:counting", eval_limit=4)
    report = check_source(
        "embedded:counting", load_task("counting"), data, lambda size: size[0] // 28
    )
    assert list(report.image_tokens) == [3] * 4  # scenes are 84 pixels wide


def test_images_and_ids_in_both_sources_are_reported(folder):
    write_files(folder, {"train.jsonl": rows("a.png", "b.png"), "test.jsonl": rows("copy.jpg")})
    task = load_task("counting")
    train, test = (check_source(str(folder / f"{n}.jsonl"), task) for n in ("train", "test"))
    assert [(Path(a).name, Path(b).name) for a, b in find_shared_images(train, test)] == [
        ("a.png", "copy.jpg")
    ]
    text = "\n".join(format_overlap(train, test))
    assert "1 IMAGES" in text
    assert "1 IDS ARE IN BOTH: r0" in text
    assert "has seen test data" in text


def test_sources_without_shared_images_are_reported_as_such(folder):
    write_files(
        folder, {"train.jsonl": rows("a.png"), "test.jsonl": [{**rows("b.png")[0], "id": "t"}]}
    )
    task = load_task("counting")
    train, test = (check_source(str(folder / f"{n}.jsonl"), task) for n in ("train", "test"))
    (line,) = format_overlap(train, test)
    assert "have no image and no id in common" in line


def test_held_out_images_in_the_training_data_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def example(name: str, image: ImageRef) -> Example:
        return Example(name, (image,), "?", 1)

    embedded = ImageRef("a", (8, 8), (8, 8), data=b"one")
    file = ImageRef("b", (8, 8), (8, 8), path=tmp_path / "b.png")
    train = [example("1", embedded), example("2", file)]
    different = ImageRef("c", (8, 8), (8, 8), data=b"two")
    warn_about_shared_images(train, [example("3", different), Example("4", (), "?", 1)])
    assert not caplog.records
    same = replace(embedded, name="elsewhere")  # names do not matter
    warn_about_shared_images(
        train, [example("3", different), example("5", same), example("6", file)]
    )
    assert (
        "2 of 3 held-out examples show an image that is also trained on (first: 5, 6)"
        in caplog.text
    )
