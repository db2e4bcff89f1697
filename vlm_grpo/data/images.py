"""Locating and measuring the images of a dataset without decoding their pixels."""

from __future__ import annotations

import base64
import io
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from PIL import Image

from vlm_grpo.media.image_decode import decode_image, read_size
from vlm_grpo.types import FileSlice, ImageRef

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""Suffixes by which files and columns of images are recognized."""
_MAX_CACHED = 10_000
"""Number of images and clips whose headers are kept for other rows of the same ones."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class ImageReader:
    """A reader of the images in a dataset's rows, which opens each file once.

    Attributes:
        roots: folders that contain all images and that paths are relative to; the first that has
            an image is used. Without any, paths are refused.
        max_pixels: largest number of pixels in an image.
    """

    def __init__(self, roots: Path | Sequence[Path] | None, max_pixels: int) -> None:
        folders = [roots] if isinstance(roots, Path) else roots or ()
        # Unlike resolve, realpath raises nothing for a symlink loop.
        self.roots = list(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.max_pixels = max_pixels
        self._cache: dict[tuple[str, str], ImageRef | str] = {}

    def read(self, value: Any, name: str) -> ImageRef:
        """Return a reference to an image after reading its header.

        Args:
            value: a path, the encoded image's bytes, ``{"bytes": …, "path": …}`` as in a table's
                image column, a ``data:`` URL, or a Pillow image.
            name: name for messages of an image without a path.

        Raises:
            ValueError: the image is missing, unreadable, too large, or outside the root.
        """
        if isinstance(value, Mapping):
            data, path = value.get("bytes"), value.get("path")
            if isinstance(data, bytes):
                return self._from_bytes(data, str(path or name))
            value = path if data is None else data
        if isinstance(value, bytes | FileSlice):
            return self._from_bytes(value, name)
        if isinstance(value, str) and value.startswith("data:"):
            return self._from_bytes(_decode_data_url(value), name)
        if isinstance(value, Path):
            value = str(value)
        if isinstance(value, Image.Image):
            self.check_pixels(value.size, name)
            return self._from_bytes(_encode(value, name), name)
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"an image must be a path, encoded bytes or a PIL image, not {_describe(value)}"
            )
        return self._read_once("image", value, self._from_path)

    def _read_once(self, kind: str, path: str, read: Callable[[str], ImageRef]) -> ImageRef:
        """Return what ``read`` returns, or raise what it raised, for the first row of a path."""
        key = kind, path
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            try:
                self._cache[key] = read(path)
            except ValueError as error:
                self._cache[key] = str(error)
        cached = self._cache[key]
        if isinstance(cached, str):
            raise ValueError(cached)
        return cached

    def _from_bytes(self, data: bytes | FileSlice, name: str) -> ImageRef:
        size = self._measure(io.BytesIO(data if isinstance(data, bytes) else data.read()), name)
        return ImageRef(name=name, size=size, resized_size=size, data=data)

    def locate(self, name: str, kind: Literal["image", "video"]) -> Path:
        """Return the file of an image or video, or the folder of a video's frames, by its path.

        Raises:
            ValueError: it is missing or outside the folders, or there are no folders.
        """
        if _URL.match(name):
            raise ValueError(f"{kind} {name} is a URL: download it and give its path")
        if "\x00" in name:
            raise ValueError(f"{kind} {name!r} cannot be read: its path contains a zero byte")
        if not self.roots:
            raise ValueError(
                f"{kind} {name} is a path: set data.image_root (--image-root) to its folder"
            )
        try:
            return self._find(name, kind)
        except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop
            raise ValueError(f"{kind} {name} cannot be read: {error}") from error

    def _from_path(self, name: str) -> ImageRef:
        path = self.locate(name, "image")
        try:
            with path.open("rb") as file:
                size = self._measure(file, name)
        except OSError as error:
            raise ValueError(f"image {name} cannot be read: {error}") from error
        return ImageRef(name=name, size=size, resized_size=size, path=path)

    def _find(self, name: str, kind: Literal["image", "video"]) -> Path:
        """Return the file in the first folder that has it.

        Raises:
            ValueError: none has it.
        """
        tried, outside, folders = [], [], []
        for root in self.roots:
            path = (root / name).resolve()
            if path.is_relative_to(root):
                if path.is_file() or (kind == "video" and path.is_dir()):
                    return path
                tried.append(str(root))
                folders += [path] * path.is_dir()
            elif os.path.lexists(root / name):
                outside.append(root)
        if outside or not tried:
            raise ValueError(
                f"{kind} {name} is outside the image folder {(outside or self.roots)[0]}: "
                "set data.image_root (--image-root) to a folder that contains all images"
            )
        if folders:
            raise ValueError(f"{kind} {name} is a folder, {folders[0]}: give the path of a file")
        raise ValueError(f"{kind} {name} is missing in {' and in '.join(tried)}")

    def _measure(self, file: BinaryIO, name: str) -> tuple[int, int]:
        """Return width and height in pixels, read from the header."""
        try:
            with warnings.catch_warnings():
                # max_pixels is the limit, not the one that Pillow warns about.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                width, height = read_size(file)
        except ValueError as error:
            raise ValueError(f"image {name} cannot be read: {error}") from error
        self.check_pixels((width, height), name)
        return width, height

    def check_pixels(self, size: tuple[int, int], name: str) -> None:
        """Raise ``ValueError`` if an image or a video's frame of a size has too many pixels."""
        if size[0] * size[1] > self.max_pixels:
            raise ValueError(
                f"image {name} has {size[0]}x{size[1]} pixels, more than "
                f"data.max_image_pixels={self.max_pixels}"
            )


def _decode_data_url(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        return base64.b64decode(data if head.endswith(";base64") else "?", validate=True)
    except ValueError as error:
        raise ValueError(f"image {url[:40]}… is no data:image/…;base64,… URL: {error}") from error


def _encode(image: Image.Image, name: str) -> bytes:
    """Return a Pillow image as a PNG with the pixels that its file would be decoded to."""
    buffer = io.BytesIO()
    try:
        decode_image(image).save(buffer, format="PNG")
    except ValueError as error:
        raise ValueError(
            f"image {name} cannot be read: {error}; a PIL image must be complete and still open"
        ) from error
    return buffer.getvalue()


def _describe(value: Any) -> str:
    """Return a value's type for a message; its repr may have dozens of lines."""
    if value is None or isinstance(value, str):
        return repr(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{name}: use Image.fromarray" if name == "numpy.ndarray" else name
