"""Datasets: every form that is read, and every bad row by file, line and reason."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from dataset_files import png_that_claims
from PIL import Image

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.jsonl import MAX_DEPTH, MAX_LINE_BYTES
from vlm_grpo.data.rows import get_answer_candidates
from vlm_grpo.data_scripts import make_shapes, make_words
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task

COUNTING = load_task("counting")
GROUNDING = load_task("grounding")
OCR = load_task("ocr")


def png(width: int = 8, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


def row(**changes: Any) -> dict[str, Any]:
    values = {"id": "a", "images": ["a.png"], "question": "How many?", "answer": 3}
    return {key: value for key, value in {**values, **changes}.items() if value is not ...}


@pytest.fixture
def folder(tmp_path):
    """A folder with one good image, beside a folder that image paths must not reach."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    return inside


def write(folder: Path, *rows: dict[str, Any] | str | bytes) -> str:
    lines = [r if isinstance(r, (str, bytes)) else json.dumps(r) for r in rows]
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines) + b"\n")
    return str(path)


def refusal(source: str, task=COUNTING, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_examples(source, task, DataSettings(train=source, **settings))
    return str(caught.value)


# What is read.


def test_a_canonical_row_becomes_an_example(folder):
    source = write(folder, row(meta={"level": 2}, license="CC0"), "", row(id=7, images=...))

    first, second = load_examples(source, COUNTING)

    assert (first.id, first.question, first.answer) == ("a", "How many?", 3)
    assert first.meta == {"level": 2, "license": "CC0"}
    assert first.images[0].size == first.images[0].resized_size == (8, 6)
    assert first.images[0].load().getpixel((0, 0)) == (255, 0, 0)
    assert (second.id, second.images) == ("7", ())  # no image at all is legal


def test_several_images_and_an_image_root_elsewhere(folder, tmp_path):
    source = write(folder, row(images=["inside/a.png", "outside.png"]))

    (example,) = load_examples(source, COUNTING, DataSettings(train=source, image_root=tmp_path))

    assert [image.name for image in example.images] == ["inside/a.png", "outside.png"]


def test_what_the_makers_write_is_what_they_draw_in_memory(tmp_path):
    drawn = make_words.draw_examples("ocr", 3, seed=5)
    path = write_examples(drawn, tmp_path / "words", "ocr.jsonl")

    read = load_examples(str(path), OCR)

    assert [(e.id, e.question, e.answer, dict(e.meta)) for e in read] == [
        (e.id, e.question, e.answer, dict(e.meta)) for e in drawn
    ]
    assert read[0].images[0].load().tobytes() == drawn[0].images[0].load().tobytes()


def test_vlm_r1_grounding_rows_are_read(folder):
    question = (
        "<image>Please provide the bounding box coordinate of the region this sentence "
        "describes: the red cup"
    )
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": [1, 2, 3, 4.5]}]
    source = write(folder, {"id": 1, "image": "a.png", "conversations": turns, "size": 3})

    (example,) = load_examples(source, GROUNDING)

    assert (example.id, example.question) == ("1", "the red cup")
    assert example.answer == {"boxes": [[1, 2, 3, 4.5]]}
    assert example.meta == {"size": 3}


def test_vlm_r1_counting_rows_may_have_several_images_and_text_answers(folder):
    turns = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "12"}]
    source = write(folder, {"image": ["a.png", "a.png"], "conversations": turns})

    (example,) = load_examples(source, COUNTING)

    assert (example.id, example.answer, len(example.images)) == ("row-1", 12, 2)


@pytest.mark.parametrize(
    ("value", "candidates"),
    [
        ("<answer> 3 </answer>", ["3", 3]),
        ("EXIT 3", ["EXIT 3"]),
        (3.0, [3.0, 3]),
        (["a", "b"], [["a", "b"]]),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [..., {"boxes": [[1, 2, 3, 4], [5, 6, 7, 8]]}]),
        ("[1, 2, 3, 4]", ["[1, 2, 3, 4]", {"boxes": [[1, 2, 3, 4]]}]),
        (
            '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]\n```',
            [..., {"boxes": [[1, 2, 3, 4]], "labels": ["cup"]}],
        ),
        ("[1, 2", ["[1, 2"]),
        ("[" * 5000, ["[" * 5000]),
    ],
)
def test_a_foreign_answer_may_stand_for_several_forms(value, candidates):
    found = get_answer_candidates(value)

    assert found == [f if c is ... else c for f, c in zip(found, candidates, strict=True)]


@pytest.mark.parametrize("name", ["counting", "grounding", "ocr"])
def test_embedded_data_suits_its_task_and_its_splits_share_no_image(name):
    source, task = f"embedded:{name}", load_task(name)
    settings = DataSettings(train=source, eval=source, train_limit=40, eval_limit=30)

    train = load_examples(source, task, settings, "train")
    held_out = load_examples(source, task, settings, "eval")

    assert (len(train), len(held_out)) == (40, 30)
    assert not {e.images[0].data for e in train} & {e.images[0].data for e in held_out}


def test_embedded_data_of_another_task_is_refused():
    assert "does not fit Counting" in refusal("embedded:ocr")
    assert "did you mean counting?" in refusal("embedded:countin")


def test_a_limit_takes_the_first_good_rows(folder):
    source = write(folder, *[row(id=i) for i in range(5)])
    settings = DataSettings(train=source, train_limit=2)

    assert [e.id for e in load_examples(source, COUNTING, settings, "train")] == ["0", "1"]
    assert len(load_examples(source, COUNTING, settings, "eval")) == 5


def test_evaluating_on_the_training_set_is_said(folder, caplog):
    source = write(folder, row())
    load_examples(source, COUNTING, DataSettings(train=source, eval=source), "eval")

    assert "not on held-out examples" in caplog.text


# What is refused.


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(answer="three"), "the answer 'three' is no whole number"),
        (row(answer=True), "no whole number"),
        (row(answer="3"), "no whole number"),  # the canonical form is strict
        (row(answer=...), "it has no answer"),
        (row(question=...), "it has no question"),
        (row(question=5), "question must be text"),
        (row(id=...), "id must be non-empty text"),
        (row(id=""), "id must be non-empty text"),
        (row(id=True), "id must be non-empty text"),
        (row(meta=[1]), "meta must be an object"),
        (row(images=[5]), "an image must be a path"),
        (row(image="a.png"), "it has images and image"),
        (row(images=["none.png"]), "image none.png is missing"),
        (row(images=["broken.png"]), "image broken.png cannot be read: it is corrupt"),
        (row(images=["text.png"]), "image text.png cannot be read: it is corrupt or of a format"),
        (row(images=["."]), "image . is missing"),
        (row(images=["a\x00.png"]), "cannot be read"),
        (row(images=["../outside.png"]), "is outside the image folder"),
        (row(images=["/etc/hostname"]), "is outside the image folder"),
        (row(images=["link.png"]), "is outside the image folder"),
        (row(images=["loop.png"]), "image loop.png"),
        (row(images=["https://example.org/a.png"]), "is a URL"),
        (row(images=["file:///etc/hostname"]), "is a URL"),
        (row(images=["data:image/png;base64,AAAA"]), "is a URL"),
        (row(images=["bomb.png"]), "image bomb.png has 10000x9000 pixels"),
        (row(images=["huge.png"]), "image huge.png cannot be read: it is too large"),
        ({"image": "a.png", "conversations": []}, "one turn from human and one from gpt"),
        ({"image": "a.png", "conversations": [{"from": "gpt", "value": 3}] * 2}, "one turn from"),
        ('{"id": "a", "question"', "the line is not JSON"),
        ('{"id": "a", "answer": NaN}', "it contains NaN"),
        ("[1, 2]", "must be a JSON object, not a list"),
        (b'{"id": "\xff"}', "not UTF-8"),
        ('{"a":' * 40 + "1" + "}" * 40, f"nested deeper than {MAX_DEPTH}"),
        ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}", f"nested deeper than {MAX_DEPTH}"),
        ('{"a": ' + "9" * 5000 + "}", "the line is not JSON"),
    ],
)
def test_a_bad_row_is_told_with_file_line_and_reason(folder, bad, reason):
    (folder / "broken.png").write_bytes(png()[:10])
    (folder / "text.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n")
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    # 90 megapixels are above the default limit; 400 are above what Pillow opens at all.
    (folder / "bomb.png").write_bytes(png_that_claims(10_000, 9_000))
    (folder / "huge.png").write_bytes(png_that_claims(20_000, 20_000))
    source = write(folder, row(id="good"), bad)

    message = refusal(source)

    assert f"{source}:2: " in message
    assert reason in message
    assert "1 bad row (good rows: 1)" in message


def test_the_pixel_limit_is_a_setting(folder):
    source = write(folder, row())

    assert "8x6 pixels" in refusal(source, max_image_pixels=47)
    assert load_examples(source, COUNTING, DataSettings(train=source, max_image_pixels=48))


def test_a_line_without_end_is_one_bad_row_and_reading_goes_on(folder):
    source = write(folder, '{"id": "' + "x" * (2 * MAX_LINE_BYTES) + '"}', row())

    assert f"{source}:1: the line is longer than" in refusal(source)
    skipping = DataSettings(train=source, on_bad_row="skip")
    assert [e.id for e in load_examples(source, COUNTING, skipping)] == ["a"]


def test_all_bad_rows_are_told_at_once_and_the_list_is_cut(folder):
    source = write(folder, *[row(id=i, answer="x") for i in range(60)])
    message = refusal(source)

    assert "60 bad rows (good rows: 0)" in message
    assert f"{source}:50: " in message
    assert f"{source}:51: " not in message
    assert "… and 10 more" in message


def test_duplicate_ids_are_told_with_both_lines(folder):
    source = write(folder, row(id=1), row(id="1"))

    assert f"{source}:2: id '1' is a duplicate of {source}:1" in refusal(source)


def test_skipping_keeps_the_good_rows_and_logs_the_others(folder, caplog):
    source = write(folder, row(id=1), row(id=2, answer="x"), row(id=3))
    with caplog.at_level(logging.WARNING):
        examples = load_examples(source, COUNTING, DataSettings(train=source, on_bad_row="skip"))

    assert [e.id for e in examples] == ["1", "3"]
    assert "skipped 1 bad row, kept 2" in caplog.text
    assert f"{source}:2: the answer 'x'" in caplog.text


def test_skipping_everything_is_an_error(folder):
    source = write(folder, row(answer="x"))

    assert "1 bad row (good rows: 0)" in refusal(source, on_bad_row="skip")


@pytest.mark.parametrize("text", [b"", b"\n\n"])
def test_an_empty_dataset_is_an_error(folder, text):
    path = folder / "empty.jsonl"
    path.write_bytes(text)

    assert f"{path} has no examples" in refusal(str(path))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("none.jsonl", "there is no data file none.jsonl"),
        ("rows.csv", "rows.csv is not a data source"),
        ("none.parquet", "there is no data file none.parquet"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(source, reason):
    assert reason in refusal(source)


def test_a_check_that_raises_something_else_is_a_bad_row_too(folder):
    source = write(folder, row(answer={"boxes": [[1, 2, 3]]}), row(id="b", answer={"boxes": 5}))

    assert "2 bad rows" in refusal(source, GROUNDING)


def test_an_image_that_is_cut_off_is_named_when_it_is_decoded(folder):
    whole = make_shapes.draw_examples("counting", 1)[0].images[0].data
    assert whole is not None
    (folder / "a.png").write_bytes(whole[:-200])
    (example,) = load_examples(write(folder, row()), COUNTING)

    with pytest.raises(ValueError, match=r"image a\.png cannot be read"):
        example.images[0].load()
