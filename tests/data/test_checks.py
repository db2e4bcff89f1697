"""Checks of datasets: bad rows, unreadable images, boxes outside, and duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from dataset_files import encode_image, photo, write_files

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.checks import (
    Measures,
    Overlap,
    check_source,
    find_overlap,
    format_overlap,
    format_report,
    warn_about_shared_images,
)
from vlm_grpo.task import Task
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef, VideoRef


def rows(*images: str, answer: object = 1) -> list[dict]:
    return [
        {"id": f"r{i}", "images": [image], "question": "?", "answer": answer}
        for i, image in enumerate(images)
    ]


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
        "embedded:counting",
        load_task("counting"),
        data,
        Measures(lambda image: image.size[0] // 28),
    )
    assert list(report.image_tokens) == [3] * 4  # scenes are 84 pixels wide


def check_both(folder: Path) -> Overlap:
    task = load_task("counting")
    return find_overlap(
        *(check_source(str(folder / f"{n}.jsonl"), task) for n in ("train", "test"))
    )


def test_images_and_ids_in_both_sources_are_reported(folder):
    write_files(folder, {"train.jsonl": rows("a.png", "b.png"), "test.jsonl": rows("copy.jpg")})
    overlap = check_both(folder)
    assert [(Path(a).name, Path(b).name) for a, b, _ in overlap.images] == [("a.png", "copy.jpg")]
    text = "\n".join(format_overlap(overlap))
    assert "1 IMAGES" in text
    assert f"{folder / 'copy.jpg'} is {folder / 'a.png'} (0.0% of the pixels differ)" in text
    assert "1 IDS ARE IN BOTH: r0" in text
    assert "has seen test data" in text


def test_sources_without_shared_images_are_reported_as_such(folder):
    write_files(
        folder, {"train.jsonl": rows("a.png"), "test.jsonl": [{**rows("b.png")[0], "id": "t"}]}
    )
    overlap = check_both(folder)
    (line,) = format_overlap(overlap)
    assert "have no image and no id in common" in line
    assert not overlap.found


def test_ids_alone_are_an_overlap_unless_they_number_the_rows(folder):
    write_files(folder, {"train.jsonl": rows("a.png"), "test.jsonl": rows("b.png")})
    assert check_both(folder).found
    for name, image in (("train", "a.png"), ("test", "b.png")):
        (row,) = rows(image)
        del row["id"]
        write_files(folder, {f"{name}.jsonl": [row]})
    assert not check_both(folder).found


def test_an_empty_source_does_not_pass(folder):
    write_files(folder, {"train.jsonl": []})
    assert not check_source(str(folder / "train.jsonl"), load_task("counting")).passed


def test_an_unreadable_image_is_reported_with_its_row(folder):
    write_files(folder, {"train.jsonl": rows("a.png", "truncated.png")})
    report = check_source(str(folder / "train.jsonl"), load_task("counting"))
    (line,) = report.unreadable_images
    assert line.startswith(f"{folder / 'train.jsonl'}:2: example r1: image truncated.png cannot be")


def test_prompts_that_cannot_be_built_are_problems(folder):
    def measure(examples: Sequence[Example], task: Task) -> tuple[list[int], list[str]]:
        return [10 * len(e.images) for e in examples[1:]], [f"{examples[0].id} is bad"]

    write_files(folder, {"train.jsonl": rows("a.png", "b.png", "truncated.png", "copy.jpg")})
    source, task = str(folder / "train.jsonl"), load_task("counting")
    report = check_source(source, task, measures=Measures(measure_prompts=measure))
    assert (report.prompt_tokens, report.bad_prompts) == ([10, 10], ["r0 is bad"])
    assert "tokens per prompt            10 to 10" in "\n".join(format_report(report))
    assert "not checked without --model" in "\n".join(format_report(check_source(source, task)))


def test_answers_that_are_lists_of_numbers_are_no_texts(folder: Path) -> None:
    source = {"t.jsonl": [{**rows("a.png")[0], "images": [], "videos": ["clip"], "answer": [0, 1]}]}
    (folder / "clip").mkdir()
    for number in range(8):
        (folder / "clip" / f"{number}.png").write_bytes(encode_image(photo(0)))
    write_files(folder, source)
    report = check_source(str(folder / "t.jsonl"), load_task("temporal"))
    assert report.passed
    assert not any("characters" in line for line in report.answers)


def test_clips_of_frames_are_compared_without_reading_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def clip(*names: str) -> Example:
        frames = tuple(ImageRef(n, (8, 8), (8, 8), path=tmp_path / n) for n in names)
        return Example("1", (VideoRef("", (8, 8), (8, 8), times=(0, 1), frames=frames),), "?", 1)

    trained = [clip("gone", "lost")]
    warn_about_shared_images(trained, [clip("gone", "other")])
    assert not caplog.records
    warn_about_shared_images(trained, [clip("gone", "lost")])
    assert "1 of 1 held-out examples" in caplog.text


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
