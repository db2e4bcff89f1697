"""Image files of every kind: what a person sees is what is read, and broken ones are told."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from vlm_grpo.data.images import ImageReader
from vlm_grpo.types import ImageRef
from vlm_grpo.utils.image_decode import FORMATS, decode, measure

# 3 x 2: red, green, blue over black, white, yellow.
COLORS = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [255, 255, 0]]],
    np.uint8,
)
SMALL = Image.fromarray(COLORS)


def saved(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return buffer


def pixels(image: Image.Image) -> list:
    return np.asarray(image).tolist()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_formats_without_loss_give_their_pixels(kind: str) -> None:
    assert measure(saved(SMALL, kind)) == (3, 2)
    assert pixels(decode(saved(SMALL, kind))) == COLORS.tolist()


def test_a_palette_is_looked_up() -> None:
    assert pixels(decode(saved(SMALL.quantize(6), "PNG"))) == COLORS.tolist()


def test_16_bits_are_brought_to_8_and_not_clipped() -> None:
    # 0x0100, 0x8000 and 0xFFFF are 1, 128 and 255 of 255; Pillow's own conversion gives 255 thrice.
    image = Image.fromarray(np.array([[0, 0x0100, 0x8000, 0xFFFF]], np.uint16))
    assert [p[0] for p in pixels(decode(saved(image, "PNG")))[0]] == [0, 1, 128, 255]


def test_32_bits_are_refused() -> None:
    file = saved(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")
    with pytest.raises(ValueError, match="32 bits: save it with 8"):
        measure(file)


def test_transparent_pixels_are_white_whatever_color_they_hide() -> None:
    image = SMALL.copy()
    image.putalpha(Image.fromarray(np.array([[0, 255, 255], [255, 255, 0]], np.uint8)))
    shown = pixels(decode(saved(image, "PNG")))
    assert (shown[0][0], shown[0][1], shown[1][2]) == ([255] * 3, [0, 255, 0], [255] * 3)


def test_cmyk_becomes_rgb() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # red ink
    red, green, blue = pixels(decode(saved(image, "JPEG", quality=95)))[4][4]
    assert red > 230  # JPEG rounds
    assert max(green, blue) < 25


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    file = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(decode(file))[0][0] == [255, 0, 0]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_that_was_turned_is_allowed_for(kind: str, orientation: int) -> None:
    # Four quarters of 16 x 8 pixels, so that JPEG keeps their colours.
    corners = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    image = Image.fromarray(corners.repeat(8, 0).repeat(16, 1))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = saved(image, kind, exif=exif, **({"quality": 95} if kind != "TIFF" else {}))

    size = measure(file)
    shown = decode(file)
    # What each orientation does to the upright corners (EXIF 2.3): row 0 is the image's named
    # side, column 0 its second one.
    turned = {
        1: corners,
        2: corners[:, ::-1],
        3: corners[::-1, ::-1],
        4: corners[::-1],
        5: corners.transpose(1, 0, 2),
        6: np.rot90(corners, -1),
        7: corners[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(corners, 1),
    }[orientation]
    assert size == shown.size == ((32, 16) if orientation < 5 else (16, 32))
    half_width, half_height = shown.width // 2, shown.height // 2
    found = np.asarray(shown, int)[half_height // 2 :: half_height, half_width // 2 :: half_width]
    assert np.abs(found - turned).max() < 40  # of 255; JPEG and WebP round


def test_a_single_pixel_is_an_image() -> None:
    file = saved(Image.new("RGB", (1, 1), "red"), "PNG")
    assert (measure(file), decode(file).size) == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "corrupt or of a format other"),
        (b"\x00" * 500, "corrupt or of a format other"),
        (b"hello, I am text\n", "corrupt or of a format other"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "corrupt or of a format other"),
    ],
    ids=["empty", "zeros", "text", "postscript"],
)
def test_what_is_no_image_is_refused_before_and_after_the_checks(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    reader = ImageReader(tmp_path, 10**6)
    with pytest.raises(ValueError, match=f"image a.png cannot be read: .*{reason}"):
        reader.read("a.png", "row")
    with pytest.raises(ValueError, match=f"image a.png cannot be read: .*{reason}"):
        ImageRef("a.png", (9, 9), (9, 9), path=path).load()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_that_is_cut_off_is_told_when_it_is_decoded(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), kind).getvalue()
    reference = ImageReader(None, 10**6).read(whole[: len(whole) // 2], "cut")
    with pytest.raises(ValueError, match="image cut cannot be read"):
        reference.load()


def test_an_image_that_was_exchanged_after_the_checks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    SMALL.save(path)
    reference = ImageReader(tmp_path, 10**6).read("a.png", "row")
    SMALL.resize((6, 4)).save(path)
    with pytest.raises(ValueError, match="has been changed: it has 6x4 pixels, and had 3x2"):
        reference.load()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of what it passes over
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes_are_an_image_or_told_by_name(kind: str) -> None:
    """200 damaged files of each format: nothing else is raised, and sizes are never wrong."""
    rng = random.Random(kind)
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), kind).getvalue()
    told = 0
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 5, 20])):
            data[rng.randrange(min(len(data), rng.choice([40, 400, len(data)])))] = rng.randrange(
                256
            )
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            reference = ImageReader(None, 10**6).read(bytes(data), "damaged")
            assert reference.load().size == reference.size
        except ValueError as error:
            assert str(error).startswith("image damaged ")  # noqa: PT017 (not every file fails)
            told += 1
    assert told > 20  # a tenth at least: the damage is real
