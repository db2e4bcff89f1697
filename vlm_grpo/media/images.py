"""Images: where their bytes are, and decoding to the pixels that a viewer shows."""

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Accepted formats. Pillow supports more, some of which run external programs."""

_FORMATS_WITH_ORIENTATION = ("JPEG", "MPO", "WEBP", None)
"""Formats whose EXIF orientation must be applied here (Pillow applies that of TIFF itself); None:
a copy of an opened image, which keeps the EXIF data but not the format."""

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that turns an image upright, by EXIF orientation; 5 to 8 swap the sides."""


def read_size(source: Path | BinaryIO) -> tuple[int, int]:
    """Return an image's upright width and height in pixels, without decoding it.

    A file that is corrupt, not in ``FORMATS``, or has 32-bit samples raises ``ValueError``.
    """
    with _open(source) as image:
        width, height = image.size
        return (height, width) if _get_orientation(image) >= 5 else (width, height)


def decode_image(source: Path | BinaryIO | Image.Image) -> Image.Image:
    """Return an image's first frame as RGB: upright, with a white background if transparent.

    Of a Pillow image, it is the current frame. Errors are those of ``read_size``.
    """
    with _open(source) as image:
        transposition = _TRANSPOSITIONS.get(_get_orientation(image))
        decoded = _convert_to_rgb(image)
        decoded.info.clear()  # a copy of it would be turned again
        return decoded if transposition is None else decoded.transpose(transposition)


@contextmanager
def _open(source: Path | BinaryIO | Image.Image) -> Iterator[Image.Image]:
    try:
        is_open = isinstance(source, Image.Image)
        with nullcontext(source) if is_open else Image.open(source, formats=FORMATS) as image:
            if image.mode in ("I", "F"):
                raise ValueError("it has 32 bits per channel: save it with 8")
            if 0 in image.size:
                raise ValueError("it has no pixels")
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"it is corrupt or of a format other than {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it is too large: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise many types for broken files
        raise ValueError(str(error) or type(error).__name__) from error


def _get_orientation(image: Image.Image) -> int:
    if image.format not in _FORMATS_WITH_ORIENTATION:
        return 1
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # corrupt EXIF data of an intact image; its readers raise many types
        return 1
    return value if value in _TRANSPOSITIONS else 1


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    foreground = image.convert("RGBA")
    background = Image.new("RGBA", foreground.size, "white")
    return Image.alpha_composite(background, foreground).convert("RGB")


def encode_png(image: Image.Image, **options: int) -> bytes:
    """Return an image as the bytes of a PNG; ``options`` are those of Pillow's writer."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def encode_data_url(image: Image.Image, **options: int) -> str:
    """Return an image as a ``data:`` URL of a PNG, with options as for ``encode_png``."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(image, **options)).decode()}"


@dataclass(frozen=True, eq=False)
class TableCell:
    """An encoded image in a table, such as a memory-mapped ``datasets.Dataset``.

    ``table[row][column]`` is bytes, ``{"bytes": …}``, or a list of such values, of which ``item``
    is the position. Pickled, for another process, it becomes the image's bytes.
    """

    table: Any
    row: int
    column: str
    item: int | None = None

    def read(self) -> bytes:
        value = self.table[self.row][self.column]
        value = value if self.item is None else value[self.item]
        return value["bytes"] if isinstance(value, Mapping) else value

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.read(),)
