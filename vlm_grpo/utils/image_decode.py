"""From an image file to its size, and to the RGB pixels that a person would see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Formats that are read. Pillow knows more, some of which start other programs."""

_TURNED = ("JPEG", "MPO", "WEBP")
"""Formats in which cameras say how to turn the image (Pillow turns TIFF itself)."""

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What shows an image upright, by its EXIF orientation; 5 to 8 swap width and height."""


def measure(source: Path | BinaryIO) -> tuple[int, int]:
    """Width and height of the image as it is shown; no pixel is decoded.

    Raises:
        ValueError: it is no image of ``FORMATS``, is broken, or is of a kind that is not read.
    """
    with _opened(source) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def decode(source: Path | BinaryIO) -> Image.Image:
    """The image as it is shown: turned upright, the first frame, on white where it is transparent.

    Raises:
        ValueError: as ``measure``, or the pixels cannot be decoded.
    """
    with _opened(source) as image:
        turn = _TRANSPOSITIONS.get(_orientation(image))
        shown = _rgb(image)
        return shown if turn is None else shown.transpose(turn)


@contextmanager
def _opened(source: Path | BinaryIO) -> Iterator[Image.Image]:
    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.mode in ("I", "F"):
                raise ValueError("its samples have 32 bits: save it with 8")
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"it is corrupt or of a format other than {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it is too large: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise a dozen kinds on broken files
        raise ValueError(str(error) or type(error).__name__) from error


def _orientation(image: Image.Image) -> int:
    """1 to 8 as in EXIF; 1 (upright) where nothing is said, or nothing that can be read."""
    if image.format not in _TURNED:
        return 1
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken camera data beside a whole image; its readers raise many kinds
        return 1
    return value if value in _TRANSPOSITIONS else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow's own conversion makes all but the darkest white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    white = Image.new("RGBA", shown.size, "white")
    return Image.alpha_composite(white, shown).convert("RGB")
