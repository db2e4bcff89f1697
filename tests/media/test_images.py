"""Decoding of image files, also of damaged ones."""

import io
import random
from typing import Any

import numpy as np
import pytest
from dataset_files import encode_image
from PIL import ExifTags, Image

from vlm_grpo.data.images import MediaReader
from vlm_grpo.media import images
from vlm_grpo.media.images import decode_image

# 3 x 2: red, green, blue over black, white, yellow.
COLORS = np.array(
    [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [255, 255, 0]]], np.uint8
)
SMALL = Image.fromarray(COLORS)


def encode(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    return io.BytesIO(encode_image(image, kind, **options))


def pixels(image: Image.Image) -> list:
    return np.asarray(image).tolist()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_keep_all_pixels(kind):
    assert images.read_size(encode(SMALL, kind)) == (3, 2)
    for image in (SMALL, SMALL.quantize(6).convert("P") if kind == "PNG" else SMALL):
        assert pixels(decode_image(encode(image, kind))) == COLORS.tolist()


def test_16_bits_become_8_transparent_pixels_white_and_an_animation_its_first_frame():
    # 0x0100, 0x8000 and 0xFFFF are 1, 128 and 255 of 255; Pillow's conversion clips all to 255.
    image = Image.fromarray(np.array([[0, 0x0100, 0x8000, 0xFFFF]], np.uint16))
    assert [p[0] for p in pixels(decode_image(encode(image, "PNG")))[0]] == [0, 1, 128, 255]
    image = SMALL.copy()
    image.putalpha(Image.fromarray(np.array([[0, 255, 255], [255, 255, 0]], np.uint8)))
    shown = pixels(decode_image(encode(image, "PNG")))
    assert (shown[0][0], shown[0][1], shown[1][2]) == ([255] * 3, [0, 255, 0], [255] * 3)
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    file = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(decode_image(file))[0][0] == [255, 0, 0]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(kind, orientation):
    # Four colors of 16 x 8 pixels, so that JPEG keeps their colors.
    corners = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    image = Image.fromarray(corners.repeat(8, 0).repeat(16, 1))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = encode(image, kind, exif=exif, **({"quality": 95} if kind != "TIFF" else {}))
    size = images.read_size(file)
    shown = decode_image(file)
    # The upright corners by orientation: EXIF 2.3 names the sides that row 0 and column 0 show.
    turned = corners.transpose(1, 0, 2)
    upright = [
        *(corners, corners[:, ::-1], corners[::-1, ::-1], corners[::-1]),
        *(turned, turned[:, ::-1], turned[::-1, ::-1], turned[::-1]),
    ][orientation - 1]
    assert size == shown.size == ((32, 16) if orientation < 5 else (16, 32))
    half_width, half_height = shown.width // 2, shown.height // 2
    colors = np.asarray(shown, int)[half_height // 2 :: half_height, half_width // 2 :: half_width]
    assert np.abs(colors - upright).max() < 40  # of 255; JPEG and WebP are lossy


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns about the damage that it ignores
@pytest.mark.parametrize("kind", images.FORMATS)
def test_a_damaged_file_decodes_or_is_named(kind):
    """Damage 200 files of each format; only a ValueError may be raised, and sizes must match."""
    rng = random.Random(kind)
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    intact = encode_image(Image.fromarray(noise), kind)
    failures = 0
    for _ in range(200):
        data = bytearray(intact)
        for _ in range(rng.choice([1, 5, 20])):
            end = min(len(data), rng.choice([40, 400, len(data)]))
            data[rng.randrange(end)] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            reference = MediaReader(None, 10**6).read(bytes(data), "damaged")
            assert reference.load().size == reference.size
        except ValueError as error:
            assert str(error).startswith("image damaged ")  # noqa: PT017 (only some files fail)
            failures += 1
    assert failures > 20  # at least a tenth, so the damage matters
