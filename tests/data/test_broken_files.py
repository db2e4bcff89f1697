"""Broken files of every format: each is refused with its file, its place and the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_files import BROKEN
from dataset_files import encode_image, get_load_error, png, png_with_claimed_size, write_table
from PIL import Image
from published_formats import write_format
from pyarrow import table
from pyarrow.parquet import write_table as write_empty_table

TASKS = {"captions": "ocr", "metadata": "counting"}
CASES = [(form, name) for form, cases in BROKEN.items() for name in cases]


@pytest.mark.parametrize(("form", "name"), CASES, ids=[f"{f}-{n}" for f, n in CASES])
def test_a_broken_file_is_refused_with_its_place(tmp_path, form, name):
    changes, reason = BROKEN[form][name]
    source = write_format(tmp_path, form, changes)
    message = get_load_error(source, TASKS.get(form, "detection"))
    assert str(tmp_path) in message
    assert reason in message


CELLS = {
    "too few": ("a.png|How many?", "it does not have 3 cells as the header"),
    "too many": ("a.png|How many?|3|4", "it does not have 3 cells as the header"),
    "no answer": ("a.png|How many?|", "the answer None must be an integer"),
    "no question": ("a.png||3", "question must be text, not None"),
    "text answer": ("a.png|How many?|many", "the answer 'many' must be"),
    "negative": ("a.png|How many?|-3", "the answer '-3' must be"),
    "fraction": ("a.png|How many?|3.5", "the answer '3.5' must be"),
    "NaN": ("a.png|How many?|nan", "the answer 'nan' must be"),
    "endless": (f"a.png|How many?|{'9' * 99}", "must be an integer"),
    "missing image": ("c.png|How many?|3", "image c.png is missing in"),
    "image elsewhere": ("../a.png|How many?|3", "image ../a.png is outside"),
    "absolute": ("/a.png|How many?|3", "image /a.png is outside"),
    "URL": ("http://a/b.png|How many?|3", "is a URL: download it"),
    "open quote": ('"a.png|How many?|3', "unexpected end of data"),
    "text after a quote": ('"a.png"x|How many?|3', "expected after"),
    "long cell": (f"a.png|{'x' * 200_000}|3", "field larger than field limit"),
    "not UTF-8": ("a.png|How m\udcffny?|3", "'utf-8' codec can't decode"),
}


def test_a_table_without_rows_and_a_dataset_of_the_whole_disk_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    write_empty_table(table({"question": [], "answer": []}), path)
    assert get_load_error(str(path)) == f"{path} has no examples"
    path = tmp_path / "data.yaml"
    path.write_text("path: /\ntrain: .\nval: .\nnames: [a]\n")
    assert "val is all of /: name a folder in it" in get_load_error(str(path), "detection")


@pytest.mark.parametrize(("suffix", "mark"), [(".csv", ","), (".tsv", "\t")])
def test_broken_tables_are_refused_with_the_line(tmp_path, suffix, mark):
    (tmp_path / "a.png").write_bytes(png(8, 6))
    path = tmp_path / f"rows{suffix}"
    for name, (line, reason) in CELLS.items():
        lines = f"image|question|answer\na.png|How many?|3\n{line}\n".replace("|", mark)
        path.write_bytes(lines.encode("utf-8", "surrogateescape"))
        message = get_load_error(str(path))
        assert reason in message, name
        assert f"{path}:3: " in message or f"file {path} cannot be read" in message, name
    for header, reason in (
        ("image|question|answer|answer", "its header has answer twice"),
        ("picture|question|answer", "it has no images, but a column picture"),
        ("image;question;answer", "its header has the one column image;question;answer"),
    ):
        path.write_text(
            f"{header}\na.png|How many?|3{'|3' * header.count('answer|')}\n".replace("|", mark)
        )
        assert reason in get_load_error(str(path))


def broken_images() -> Iterator[tuple[str, bytes | Callable[[Path], Any], str]]:
    """Yield what can be wrong with an image file: its content, or what makes it, and the reason."""
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8))
    corrupt = "corrupt or of a format other than"
    yield "empty", b"", corrupt
    yield "text", b"not an image", corrupt
    yield "zeros", bytes(300), corrupt
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", corrupt
    yield "PDF", b"%PDF-1.7\n" + bytes(99), corrupt
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", corrupt
    yield "icon", encode_image(photo, "ICO"), corrupt
    yield "too large", png_with_claimed_size(10_000, 9_000), "more than data.max_image_pixels"
    yield "bomb", png_with_claimed_size(60_000, 60_000), "it is too large"
    yield "no pixels", png_with_claimed_size(0, 5), "cannot be read"
    yield "32 bits", encode_image(Image.new("F", (8, 6)), "TIFF"), "it has 32 bits per channel"
    for form, length in (("PNG", 20), ("JPEG", 100), ("WEBP", 12), ("GIF", 5), ("BMP", 12)):
        yield f"truncated {form}", encode_image(photo, form)[:length], "cannot be read"
    yield (
        "link elsewhere",
        lambda path: path.symlink_to("/etc/passwd"),
        "is outside the image folder",
    )
    yield "dangling link", lambda path: path.symlink_to("none.png"), "is missing in"
    yield "loop", lambda path: path.symlink_to(path.name), "image"
    yield "folder", lambda path: path.mkdir(), "is a folder, "


IMAGE_PLACES = {
    "coco": "a.png",
    "captions": "a.png",
    "voc": "JPEGImages/a.png",
    "yolo": "images/a.png",
    "metadata": "a.png",
}


@pytest.mark.parametrize("form", IMAGE_PLACES)
def test_broken_images_are_refused_with_their_row(tmp_path, form):
    for number, (name, content, reason) in enumerate(broken_images()):
        folder = tmp_path / str(number)
        path = folder / IMAGE_PLACES[form]
        path.parent.mkdir(parents=True)
        source = write_format(folder, form, {IMAGE_PLACES[form]: None})
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
        message = get_load_error(source, TASKS.get(form, "detection"))
        assert str(folder) in message, name
        assert "a.png" in message, name
        assert reason in message or form == "yolo", f"{name}: {message}"


def test_broken_rows_of_a_table_are_refused_together_with_their_numbers(tmp_path):
    good = {"image": {"bytes": png(8, 6), "path": None}, "question": "?", "answer": "1"}
    images = [(content, reason) for _, content, reason in broken_images()]
    rows = [
        ({**good, "image": {"bytes": content, "path": None}}, reason)
        for content, reason in images
        if isinstance(content, bytes)
    ]
    rows += [
        ({**good, "image": {"bytes": None, "path": "c.png"}}, "image c.png is missing in"),
        ({**good, "image": {"bytes": None, "path": "../c.png"}}, "image ../c.png is outside"),
        ({**good, "image": {"bytes": None, "path": None}}, "an image must be a path"),
        ({**good, "question": None}, "question must be text, not None"),
        ({**good, "answer": None}, "the answer None must be an integer"),
        ({**good, "answer": "many"}, "the answer 'many' must be an integer"),
        ({**good, "answer": "-1"}, "the answer '-1' must be an integer"),
    ]
    path = write_table(tmp_path / "rows.parquet", [good, *(row for row, _ in rows)])
    message = get_load_error(str(path))
    assert f"{len(rows)} bad rows (good rows: 1)" in message
    lines = message.splitlines()
    own = {n: line for n in range(2, len(rows) + 2) for line in lines if f" row {n}: " in line}
    assert all(rows[number - 2][1] in line for number, line in own.items())
    others = re.findall(r"(\d+) more like it", message)
    assert len(own) + sum(map(int, others)) == len(rows)
    assert len(own) > 12
    assert len(rows) >= 20


def test_a_link_to_a_folder_of_images_elsewhere_is_refused(tmp_path):
    row = {"file_name": "other/b.png", "question": "How many?", "answer": 1}
    source = write_format(tmp_path / "data", "metadata", {"metadata.jsonl": [row]})
    write_format(tmp_path / "secret", "metadata")
    os.symlink(tmp_path / "secret", tmp_path / "data/other")
    assert "image other/b.png is outside the image folder" in get_load_error(source)
