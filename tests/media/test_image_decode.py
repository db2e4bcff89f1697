"""Decoding of image files in all formats and orientations, and of damaged files."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from vlm_grpo.data.images import MediaReader
from vlm_grpo.media.image_decode import FORMATS, decode_image, read_size

# 3 x 2: red, green, blue over black, white, yellow.
COLORS = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [255, 255, 0]]],
    np.uint8,
)
SMALL = Image.fromarray(COLORS)


def encode(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return buffer


def pixels(image: Image.Image) -> list:
    return np.asarray(image).tolist()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_all_pixels(kind: str) -> None:
    assert read_size(encode(SMALL, kind)) == (3, 2)
    assert pixels(decode_image(encode(SMALL, kind))) == COLORS.tolist()


def test_palette_images_become_rgb() -> None:
    assert pixels(decode_image(encode(SMALL.quantize(6), "PNG"))) == COLORS.tolist()


def test_16_bit_images_are_scaled_to_8_bits() -> None:
    # 0x0100, 0x8000 and 0xFFFF are 1, 128 and 255 of 255; Pillow's conversion clips all to 255.
    image = Image.fromarray(np.array([[0, 0x0100, 0x8000, 0xFFFF]], np.uint16))
    assert [p[0] for p in pixels(decode_image(encode(image, "PNG")))[0]] == [0, 1, 128, 255]


def test_32_bit_images_are_refused() -> None:
    file = encode(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")
    with pytest.raises(ValueError, match="32 bits per channel: save it with 8"):
        read_size(file)


def test_transparent_pixels_become_white() -> None:
    image = SMALL.copy()
    image.putalpha(Image.fromarray(np.array([[0, 255, 255], [255, 255, 0]], np.uint8)))
    shown = pixels(decode_image(encode(image, "PNG")))
    assert (shown[0][0], shown[0][1], shown[1][2]) == ([255] * 3, [0, 255, 0], [255] * 3)


def test_cmyk_images_become_rgb() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # red ink
    red, green, blue = pixels(decode_image(encode(image, "JPEG", quality=95)))[4][4]
    assert red > 230  # JPEG rounds
    assert max(green, blue) < 25


def test_an_animation_yields_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    file = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(decode_image(file))[0][0] == [255, 0, 0]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    # Four colors of 16 x 8 pixels, so that JPEG keeps their colors.
    corners = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    image = Image.fromarray(corners.repeat(8, 0).repeat(16, 1))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = encode(image, kind, exif=exif, **({"quality": 95} if kind != "TIFF" else {}))

    size = read_size(file)
    shown = decode_image(file)
    # The upright corners by orientation: EXIF 2.3 names the sides that row 0 and column 0 show.
    upright = {
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
    colors = np.asarray(shown, int)[half_height // 2 :: half_height, half_width // 2 :: half_width]
    assert np.abs(colors - upright).max() < 40  # of 255; JPEG and WebP are lossy


def test_an_image_may_have_one_pixel() -> None:
    file = encode(Image.new("RGB", (1, 1), "red"), "PNG")
    assert (read_size(file), decode_image(file).size) == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 500,
        b"hello, I am text\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
    ids=["empty", "zeros", "text", "postscript"],
)
def test_files_of_other_formats_are_refused(content: bytes) -> None:
    for function in (read_size, decode_image):
        with pytest.raises(ValueError, match="corrupt or of a format other than PNG, JPEG"):
            function(io.BytesIO(content))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns about the damage that it ignores
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_decodes_or_is_named(kind: str) -> None:
    """Damage 200 files of each format; only a ValueError may be raised, and sizes must match."""
    rng = random.Random(kind)
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    intact = encode(Image.fromarray(noise), kind).getvalue()
    failures = 0
    for _ in range(200):
        data = bytearray(intact)
        for _ in range(rng.choice([1, 5, 20])):
            data[rng.randrange(min(len(data), rng.choice([40, 400, len(data)])))] = rng.randrange(
                256
            )
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            reference = MediaReader(None, 10**6).read(bytes(data), "damaged")
            assert reference.load().size == reference.size
        except ValueError as error:
            assert str(error).startswith("image damaged ")  # noqa: PT017 (only some files fail)
            failures += 1
    assert failures > 20  # at least a tenth, so the damage matters
