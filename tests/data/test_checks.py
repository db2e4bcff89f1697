"""The report of data: bad rows, dead images, boxes outside, copies within and between sources."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from dataset_files import put
from PIL import Image
from typer.testing import CliRunner

from vlm_grpo.cli.data import app
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
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task
from vlm_grpo.types import Example, ImageRef


def photo(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """A smooth random picture, as photographs are at a coarse scale."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "PNG", **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


def rows(*images: str, answer: object = 1) -> list[dict]:
    return [
        {"id": f"r{i}", "images": [image], "question": "?", "answer": answer}
        for i, image in enumerate(images)
    ]


def test_copies_survive_encoding_and_resizing_and_others_do_not():
    first = photo(0)
    jpeg = Image.open(io.BytesIO(encoded(first, "JPEG", quality=70)))
    smaller = first.resize((80, 60), Image.Resampling.LANCZOS)
    pictures = [first, photo(1), jpeg, photo(2), smaller]
    assert find_duplicates([hash_image(picture) for picture in pictures]) == [[0, 2, 4]]


def test_no_two_of_many_photographs_or_scenes_are_taken_for_copies():
    scenes = [row.images[0].load() for row in make_shapes.draw_examples("counting", 300, seed=5)]
    prints = [hash_image(picture) for picture in [*map(photo, range(300)), *scenes]]
    assert find_duplicates(prints) == []


def test_one_other_small_object_makes_another_picture():
    scene = Image.new("RGB", (84, 84), "white")
    red, blue = scene.copy(), scene.copy()
    red.paste("red", (30, 30, 44, 44))
    blue.paste("blue", (30, 30, 44, 44))
    assert find_duplicates([hash_image(picture) for picture in (scene, red, blue)]) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    whole = encoded(photo(0))
    files = {
        "a.png": whole,
        "copy.jpg": encoded(photo(0), "JPEG", quality=80),
        "b.png": encoded(photo(1)),
        "torn.png": encoded(photo(2))[:3000],
    }
    return put(tmp_path, files)


def test_a_source_with_everything_wrong(folder):
    images = ("a.png", "copy.jpg", "b.png", "torn.png", "gone.png")
    put(folder, {"train.jsonl": [*rows(*images), {"id": "x", "question": "?", "answer": "many"}]})
    report = check_source(str(folder / "train.jsonl"), load_task("counting"))
    assert len(report.examples) == 4
    assert [line.partition(": ")[2] for line in report.bad_rows] == [
        f"image gone.png is missing in {folder}",
        "the answer 'many' is no whole number of at least 0",
    ]
    assert len(report.unreadable_images) == 1, "its header is whole, its pixels are not"
    assert "torn.png" in report.unreadable_images[0]
    assert [[Path(name).name for name in group] for group in report.duplicates] == [
        ["a.png", "copy.jpg"]
    ]
    assert not report.passed
    told = "\n".join(format_report(report))
    assert "bad rows                     2" in told
    assert "1: 100.0%" in told


def test_boxes_outside_and_their_spread(folder):
    inside, outside = {"boxes": [[0, 0, 160.5, 120]]}, {"boxes": [[100, 20, 170, 40]]}
    put(folder, {"t.jsonl": rows("a.png", answer=inside)})
    assert check_source(str(folder / "t.jsonl"), load_task("grounding")).passed
    put(folder, {"t.jsonl": rows("a.png", answer=outside)})
    report = check_source(str(folder / "t.jsonl"), load_task("grounding"))
    assert report.boxes_outside == ["r0: [100.0, 20.0, 170.0, 40.0] in 160x120"]
    assert any("boxes per row                1: 1" in line for line in format_report(report))


def test_answers_of_ocr():
    report = check_source("embedded:ocr", load_task("ocr"))
    assert report.passed
    told = "\n".join(format_report(report))
    assert "characters per answer" in told
    assert "most frequent" in told


def test_image_tokens_under_a_budget():
    data = DataSettings(train="embedded:counting", eval="embedded:counting", eval_limit=4)
    report = check_source(
        "embedded:counting", load_task("counting"), data, lambda size: size[0] // 28
    )
    assert list(report.image_tokens) == [3] * 4  # scenes are 84 pixels wide


def test_what_train_and_test_share_is_loud(folder):
    put(folder, {"train.jsonl": rows("a.png", "b.png"), "test.jsonl": rows("copy.jpg")})
    task = load_task("counting")
    train, test = (check_source(str(folder / f"{n}.jsonl"), task) for n in ("train", "test"))
    assert [(Path(a).name, Path(b).name) for a, b in find_shared_images(train, test)] == [
        ("a.png", "copy.jpg")
    ]
    told = "\n".join(format_overlap(train, test))
    assert "1 IMAGES" in told
    assert "1 IDS ARE IN BOTH: r0" in told
    assert "has seen test data" in told


def test_sources_that_share_nothing_say_so(folder):
    put(folder, {"train.jsonl": rows("a.png"), "test.jsonl": [{**rows("b.png")[0], "id": "t"}]})
    task = load_task("counting")
    train, test = (check_source(str(folder / f"{n}.jsonl"), task) for n in ("train", "test"))
    (line,) = format_overlap(train, test)
    assert "have no image and no id in common" in line


def run(*arguments: str) -> tuple[str, BaseException | None]:
    outer = typer.Typer()
    outer.add_typer(app, name="data")
    result = CliRunner().invoke(outer, ["data", "check", *arguments])
    return result.output, result.exception


def test_the_command(folder):
    put(folder, {"train.jsonl": rows("a.png"), "test.jsonl": rows("copy.jpg")})
    train, test = str(folder / "train.jsonl"), str(folder / "test.jsonl")
    told, error = run(train, "--task", "counting", "--token-side", "28")
    assert error is None
    # 160x120 goes to 168x112 by Qwen's resize: 6 by 4 tokens of 28 pixels.
    assert "image tokens per example     24 to 24" in told
    told, error = run(train, "--task", "counting", "--against", test)
    assert isinstance(error, UserError)
    assert "ARE ALSO IN" in told


def test_the_command_looks_at_no_more_rows_than_asked(folder):
    lines = "".join(json.dumps(row) + "\n" for row in rows("a.png", "gone.png"))
    put(folder, {"train.jsonl": lines})
    told, error = run(str(folder / "train.jsonl"), "--task", "counting", "--limit", "1")
    assert error is None
    assert "1 good rows" in told


def test_training_warns_of_held_out_images_that_it_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def example(name: str, image: ImageRef) -> Example:
        return Example(name, (image,), "?", 1)

    inside = ImageRef("a", (8, 8), (8, 8), data=b"one")
    file = ImageRef("b", (8, 8), (8, 8), path=tmp_path / "b.png")
    train = [example("1", inside), example("2", file)]
    other = ImageRef("c", (8, 8), (8, 8), data=b"two")
    warn_about_shared_images(train, [example("3", other), Example("4", (), "?", 1)])
    assert not caplog.records
    same = replace(inside, name="elsewhere")  # the name of a table's row says nothing
    warn_about_shared_images(train, [example("3", other), example("5", same), example("6", file)])
    assert (
        "2 of 3 held-out examples show an image that is also trained on (first: 5, 6)"
        in caplog.text
    )
