"""Images of a dataset: every form of reference, and the reason why each bad one is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import check_bad_row, encode_image, get_load_error, make_row, png, write_rows
from dataset_files import png_with_claimed_size as claimed_size
from PIL import ExifTags, Image, ImageOps

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.images import ImageReader
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task

COUNTING = load_task("counting")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("a.png", "a.png"),
        (png(8, 6), "row 1"),
        ({"bytes": png(8, 6), "path": "x.png"}, "x.png"),
        ({"bytes": png(8, 6), "path": None}, "row 1"),
        ({"path": "a.png"}, "a.png"),
        (Image.new("RGB", (8, 6), (200, 10, 10)), "row 1"),
    ],
    ids=["path", "bytes", "bytes and path", "bytes without path", "path in a table", "Pillow"],
)
def test_an_image_is_read_from_every_form_of_reference(folder: Path, value: Any, name: str):
    reference = ImageReader(folder, max_pixels=48).read(value, "row 1")

    assert (reference.name, reference.size, reference.resized_size) == (name, (8, 6), (8, 6))
    assert reference.load().getpixel((7, 5)) == (200, 10, 10)


def test_each_file_is_opened_once(folder: Path):
    reader = ImageReader(folder, max_pixels=48)
    first = reader.read("a.png", "row 1")
    with pytest.raises(ValueError, match=r"b\.png is missing"):
        reader.read("b.png", "row 2")
    (folder / "a.png").unlink()
    (folder / "b.png").write_bytes(png(8, 6))

    assert reader.read("a.png", "row 3") is first
    with pytest.raises(ValueError, match=r"b\.png is missing"):
        reader.read("b.png", "row 4")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (make_row(images=[5]), "must be a path, encoded bytes or a PIL image, not int"),
        (make_row(images=[{"bytes": 5}]), "an image must be a path, encoded bytes or a PIL image"),
        (make_row(images=["none.png"]), "image none.png is missing"),
        (make_row(images=["broken.png"]), "image broken.png cannot be read: it is corrupt"),
        (make_row(images=["text.png"]), "text.png cannot be read: it is corrupt or of a format"),
        (make_row(images=["."]), "image . is a folder, "),
        (make_row(images=["a\x00.png"]), "cannot be read"),
        (make_row(images=["../outside.png"]), "is outside the image folder"),
        (make_row(images=["/etc/hostname"]), "is outside the image folder"),
        (make_row(images=["link.png"]), "is outside the image folder"),
        (make_row(images=["loop.png"]), "image loop.png"),
        (make_row(images=["https://example.org/a.png"]), "is a URL"),
        (make_row(images=["file:///etc/hostname"]), "is a URL"),
        (make_row(images=["data:image/png;base64,AAAA"]), "rows.jsonl:2 image 1 cannot be read"),
        (make_row(images=["data:image/png;base64,A"]), "is no data:image/…;base64,… URL: "),
        (make_row(images=["data:image/png,PNG"]), "is no data:image/…;base64,… URL: "),
        (make_row(images=["bomb.png"]), "image bomb.png has 10000x9000 pixels"),
        (make_row(images=["huge.png"]), "image huge.png cannot be read: it is too large"),
    ],
)
def test_a_row_with_a_bad_image_is_named_with_file_line_and_reason(
    folder: Path, bad: dict, reason: str
):
    (folder / "broken.png").write_bytes(png()[:10])
    (folder / "text.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n")
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    # 90 megapixels exceed the default limit; 400 exceed the limit of Pillow.
    (folder / "bomb.png").write_bytes(claimed_size(10_000, 9_000))
    (folder / "huge.png").write_bytes(claimed_size(20_000, 20_000))

    check_bad_row(folder, bad, reason)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 500, b"hello, I am text\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9\n"],
    ids=["empty", "zeros", "text", "postscript"],
)
def test_a_file_that_is_no_image_is_named(folder: Path, content: bytes):
    (folder / "b.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"image b\.png cannot be read: .*corrupt or of a format"):
        ImageReader(folder, 10**6).read("b.png", "row 1")


def test_a_rotated_image_has_one_size_in_every_form(tmp_path: Path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encode_image(Image.new("RGB", (8, 6)), "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    image = Image.open(io.BytesIO(data))
    reader = ImageReader(tmp_path, 100)

    for value in ("a.jpg", data, image, image.copy(), ImageOps.exif_transpose(image)):
        assert reader.read(value, "row 1").size == (6, 8)


def test_a_pil_image_is_read_as_its_file_is():
    image = Image.new("CMYK", (8, 6), (0, 255, 255, 0))

    assert ImageReader(None, 100).read(image, "row 1").load().getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ValueError, match="image row 1 cannot be read: it has 32 bits per channel"):
        ImageReader(None, 100).read(Image.new("F", (8, 6)), "row 1")


def test_a_pil_image_over_the_limit_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr("vlm_grpo.data.images._encode", lambda *_: pytest.fail("it was encoded"))

    with pytest.raises(ValueError, match="image row 1 has 20x6 pixels, more than"):
        ImageReader(None, 100).read(Image.new("RGB", (20, 6)), "row 1")


def test_a_pil_image_without_pixels_is_a_bad_row():
    data = make_shapes.draw_examples("counting", 1)[0].images[0].read_bytes()
    closed = Image.new("RGB", (8, 6))
    closed.close()
    lazy = Image.open(io.BytesIO(data))
    lazy.close()
    images = [Image.open(io.BytesIO(data[:-200])), closed, lazy, Image.new("RGB", (0, 0))]

    with pytest.raises(UserError) as caught:
        load_examples([{"image": i, "question": "?", "answer": 1} for i in images], COUNTING)

    for number in range(1, 5):
        assert f"row {number}: image data.eval row {number} image 1 cannot be" in str(caught.value)
    assert str(caught.value).count("a PIL image must be complete and still open") == 4


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.zeros((90, 90, 3)), "numpy.ndarray: use Image.fromarray"),
        (io.BytesIO(), "_io.BytesIO"),
        ((path for path in ["a.png"]), "generator"),
        (None, "None"),
    ],
    ids=["array", "stream", "generator", "None"],
)
def test_the_type_of_what_is_not_an_image_is_named(value: Any, name: str):
    with pytest.raises(ValueError, match="an image must be") as caught:
        ImageReader(None, 100).read(value, "row 1")

    problem = f"an image must be a path, encoded bytes or a PIL image, not {name}"
    assert str(caught.value) == problem


def test_a_path_without_a_root_names_the_setting():
    with pytest.raises(ValueError, match=r"image a\.png is a path: set data\.image_root"):
        ImageReader(None, 10**6).read("a.png", "row 1")


def test_a_root_that_is_a_symlink_loop_is_a_missing_image(tmp_path: Path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=r"image a\.png (is missing|cannot be read)"):
        ImageReader(loop, 10**6).read("a.png", "row 1")


def test_the_pixel_limit_is_a_setting(folder: Path):
    source = write_rows(folder, make_row())

    assert "8x6 pixels" in get_load_error(source, max_image_pixels=47)
    assert load_examples(source, COUNTING, DataSettings(train=source, max_image_pixels=48))


def test_a_truncated_image_passes_loading_and_is_named_when_decoded(folder: Path):
    data = make_shapes.draw_examples("counting", 1)[0].images[0].read_bytes()
    (folder / "a.png").write_bytes(data[:-200])
    (example,) = load_examples(write_rows(folder, make_row()), COUNTING)

    with pytest.raises(ValueError, match=r"image a\.png cannot be read"):
        example.images[0].load()
