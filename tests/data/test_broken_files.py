"""Broken files of every format are refused with file, place and reason; ``broken_files.yaml`` has
the changes and messages that take no code."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dataset_files import encode_image, get_load_error, png, png_with_claimed_size, write_table
from PIL import Image
from published_formats import COCO, FORMATS, YAML, voc_xml, write_format, yolo_labels

Changes = dict[str, Any]
HUGE = 16 * 2**20 + 1
TABLE = yaml.safe_load(Path(__file__).with_name("broken_files.yaml").read_text("utf-8"))
XML = "Annotations/a.xml"


def change(value: Any, path: str, new: Any) -> Any:
    changed = copy.deepcopy(value)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = reduce(getitem, keys, changed)
    if new == "REMOVE":
        del inner[last]
    else:
        inner[last] = new
    return changed


def apply(form: str, case: dict[str, Any]) -> Changes:
    """Return the files that a case of the table changes."""
    match case:
        case {"set": [path, new]}:
            name, files = FORMATS[form]
            return {name: change(files[name], path, new)}
        case {"replace": [old, new]}:
            assert old in voc_xml("a")
            return {XML: voc_xml("a").replace(old, new, 1)}
        case {"line": line}:
            return {"labels/a.txt": f"{yolo_labels('a')}{line}\n"}
        case {"row": changes}:
            row = {"file_name": "a.png", "question": "How many?", "answer": 1, **changes}
            return {"metadata.jsonl": [{k: v for k, v in row.items() if v != "REMOVE"}]}
    files: Changes = case["files"]
    return {FORMATS[form][0] if name == "FILE" else name: text for name, text in files.items()}


WITH_ENTITIES = {
    name: f"<!DOCTYPE a [{text}]>" + voc_xml("a").replace("cup", "&c;")
    for name, text in (
        ("bomb", '<!ENTITY b "cup"><!ENTITY c "&b;&b;">'),
        ("file", '<!ENTITY c SYSTEM "file:///etc/passwd">'),
    )
}
JSON_TEXT = json.dumps(COCO).encode()
WITH_CODE: dict[str, dict[str, tuple[Any, str]]] = {
    "coco": {
        "truncated": (JSON_TEXT[:-40], "it is not JSON"),
        "UTF-16": (JSON_TEXT.decode().encode("utf-16"), "it is not UTF-8"),
        "infinite box": (JSON_TEXT.replace(b"12.5", b"1e999"), "has a number that is not finite"),
    },
    "voc": {
        "truncated": (voc_xml("a")[:-60], "a.xml: unclosed token: line 1"),
        "huge": (b" " * HUGE, "the file is larger than"),
        **{
            f"{name} in {code}": (text.encode(code), "a.xml: it has a document type")
            for name, text in WITH_ENTITIES.items()
            for code in ("utf-8", "utf-16")
        },
    },
    "yolo": {
        "not UTF-8": ({"labels/a.txt": b"1 .5 .5 .1 .1 \xff\n"}, "a.txt: image"),
        "huge": ({"labels/a.txt": b" " * HUGE}, "its labels are larger than"),
        "two images": ({"images/a.jpg": png(8, 8)}, "id 'a-1' is a duplicate of"),
        "alias bomb": (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{n}: &{n} [{f'*{m}, ' * 9}]\n" for m, n in pairwise("abcdefghi"))
            + "names: [*i]\nval: images",
            "names must be a list of class names",
        ),
        "part elsewhere": (YAML.replace(": images", ": gone"), "there is no gone"),
    },
}
"""Changed files, or the new content of the format's first file, by format and name."""
CASES: dict[str, tuple[str, Changes, str]] = {
    f"{form}-{name}": (form, apply(form, case), case["says"])
    for form, cases in TABLE.items()
    for name, case in cases.items()
}
"""The format, its changed files and the part of the message, by name."""
for _form, _cases in WITH_CODE.items():
    for _name, (_changed, _reason) in _cases.items():
        _changes = _changed if isinstance(_changed, dict) else {FORMATS[_form][0] or XML: _changed}
        CASES[f"{_form}-{_name}"] = (_form, _changes, _reason)

TASKS = {"captions": "ocr", "metadata": "counting"}


@pytest.mark.parametrize(("form", "changes", "reason"), CASES.values(), ids=CASES)
def test_a_broken_file_is_refused_with_its_place(tmp_path, form, changes, reason):
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
    path = write_table(tmp_path / "rows.parquet", [])
    assert get_load_error(path) == f"{path} has no examples"
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
    for lines, reason in (
        ("image|question|answer|answer\na.png|?|3|3\n", "its header has answer twice"),
        ("picture|question|answer\na.png|?|3\n", "it has no images, but a column picture"),
        ("image;question;answer\n", "its header has the one column image;question;answer"),
    ):
        path.write_text(lines.replace("|", mark))
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
    yield "link elsewhere", lambda path: path.symlink_to("/etc/passwd"), "outside the image folder"
    yield "dangling link", lambda path: path.symlink_to("none.png"), "is missing in"
    yield "loop", lambda path: path.symlink_to(path.name), "image"
    yield "folder", lambda path: path.mkdir(), "is a folder, "


IMAGE_PLACES = {
    **dict.fromkeys(("coco", "captions", "metadata"), "a.png"),
    **{"voc": "JPEGImages/a.png", "yolo": "images/a.png"},
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
