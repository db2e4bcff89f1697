"""Locating and measuring the images and clips of a dataset without decoding them."""

import base64
import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.media.images import decode_image, encode_png, read_size
from vlm_grpo.media.videos import choose_times, read_shape, sort_frames
from vlm_grpo.types import ImageRef, VideoRef

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""Suffixes by which files and columns of images are recognized."""
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv"),
    *(".asf", ".wmv"),
)
"""Suffixes by which files and columns of clips are recognized."""
_MAX_CACHED = 10_000
"""Number of images and clips whose headers are kept for other rows of the same ones."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True)
class Clip:
    """A clip of a row, not yet read."""

    # a path or the bytes of a video file, the path of a folder of frames, a list of frames, or
    # ``{"frames": […], "fps": …}`` or ``{"frames": […], "times": […]}``
    value: Any


class MediaReader:
    """A reader of the images and clips in a dataset's rows, which opens each file once.

    ``roots`` are folders that contain all images and that paths are relative to; the first that
    has an image is used, and without any, paths are refused. ``max_pixels`` limits an image or a
    frame, and ``video`` says which frames of clips are taken.
    """

    def __init__(
        self,
        roots: Path | Sequence[Path] | None,
        max_pixels: int,
        video: VideoSettings | None = None,
    ) -> None:
        folders = [roots] if isinstance(roots, Path) else roots or ()
        # Unlike resolve, realpath raises nothing for a symlink loop.
        self.roots = list(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.max_pixels = max_pixels
        self.video = video or VideoSettings()
        self._read_once = lru_cache(_MAX_CACHED)(lambda read, path: read(path))

    def read(self, value: Any, name: str) -> ImageRef:
        """Return a reference to an image or clip after reading its header.

        ``value`` is a ``Clip``, or an image: a path, encoded bytes, ``{"bytes": …, "path": …}`` as
        in a table, a ``data:`` URL, or a Pillow image. ``name`` names what has no path in messages.
        """
        if isinstance(value, Clip):
            return self._read_clip(value.value, name)
        if isinstance(value, Mapping):
            data, path = value.get("bytes"), value.get("path")
            if isinstance(data, bytes):
                return self._from_bytes(data, str(path or name))
            value = path if data is None else data
        if isinstance(value, bytes):
            return self._from_bytes(value, name)
        if isinstance(value, str) and value.startswith("data:"):
            return self._from_bytes(_decode_data_url(value), name)
        if isinstance(value, Path):
            value = str(value)
        if isinstance(value, Image.Image):
            self._check_pixels(value.size, name)
            try:  # the pixels that its file would be decoded to
                return self._from_bytes(encode_png(decode_image(value)), name)
            except ValueError as error:
                raise ValueError(
                    f"image {name} cannot be read: {error}; a PIL image must be complete and still "
                    "open"
                ) from error
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"an image must be a path, encoded bytes or a PIL image, not {_describe(value)}"
            )
        return self._read_once(self._read_image_file, value)

    def _from_bytes(self, data: bytes, name: str) -> ImageRef:
        size = self._measure(io.BytesIO(data), name)
        return ImageRef(name=name, size=size, resized_size=size, data=data)

    def _read_image_file(self, name: str) -> ImageRef:
        path = self._locate(name, "image")
        try:
            with path.open("rb") as file:
                size = self._measure(file, name)
        except OSError as error:
            raise ValueError(f"image {name} cannot be read: {error}") from error
        return ImageRef(name=name, size=size, resized_size=size, path=path)

    def _locate(self, name: str, kind: Literal["image", "video"]) -> Path:
        if _URL.match(name):
            raise ValueError(f"{kind} {name} is a URL: download it and give its path")
        if "\x00" in name:
            raise ValueError(f"{kind} {name!r} cannot be read: its path contains a zero byte")
        if not self.roots:
            raise ValueError(f"{kind} {name} is a path: set data.image_root to its folder")
        try:
            return self._find(name, kind)
        except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop
            raise ValueError(f"{kind} {name} cannot be read: {error}") from error

    def _find(self, name: str, kind: Literal["image", "video"]) -> Path:
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
                "set data.image_root to a folder that contains all images"
            )
        if folders:
            raise ValueError(f"{kind} {name} is a folder, {folders[0]}: give the path of a file")
        raise ValueError(f"{kind} {name} is missing in {' and in '.join(tried)}")

    def _measure(self, file: BinaryIO, name: str) -> tuple[int, int]:
        try:
            with warnings.catch_warnings():
                # max_pixels is the limit, not the one that Pillow warns about.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                size = read_size(file)
        except ValueError as error:
            raise ValueError(f"image {name} cannot be read: {error}") from error
        self._check_pixels(size, name)
        return size

    def _check_pixels(self, size: tuple[int, int], name: str) -> None:
        if size[0] * size[1] > self.max_pixels:
            raise ValueError(
                f"image {name} has {size[0]}x{size[1]} pixels, more than "
                f"data.max_image_pixels={self.max_pixels}"
            )

    def _read_clip(self, value: Any, name: str) -> ImageRef:
        if isinstance(value, Mapping) and "frames" not in value:
            value = value.get("bytes") or value.get("path") or value.get("video")
        if isinstance(value, str | Path) and str(value):
            return self._read_once(self._read_video_path, str(value))
        if isinstance(value, bytes):
            return self._read_video(value, name)
        given = value if isinstance(value, Mapping) else {"frames": value}
        if not isinstance(given["frames"], list | tuple):
            raise ValueError(
                "a video must be a path, encoded bytes, a list of frames or an object with "
                f"frames, not {type(given['frames']).__name__}"
            )
        return self._read_frames(given, name)

    def _read_video_path(self, name: str) -> VideoRef:
        path = self._locate(name, "video")
        if path.is_file():
            return self._read_video(path, name)
        try:
            files = [file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
        except OSError as error:
            raise ValueError(f"video {name} cannot be read: {error}") from error
        return self._read_frames({"frames": [str(file) for file in sort_frames(files)]}, name)

    def _read_video(self, source: Path | bytes, name: str) -> VideoRef:
        path = source if isinstance(source, Path) else None
        data = None if isinstance(source, Path) else source
        try:
            size, fps, total = read_shape(path or io.BytesIO(data or b""))
        except ValueError as error:
            raise ValueError(f"video {name} cannot be read: {error}") from error
        self._check_pixels(size, name)
        seconds, limits = total / fps, self.video
        self._check_length(seconds, name)
        if total < 2:
            raise ValueError(f"video {name} has one frame: give it as an image")
        times = choose_times(total, fps, limits.fps, limits.max_frames)
        return VideoRef(name, size, size, path, data, times=times, seconds=seconds)

    def _read_frames(self, given: Mapping[str, Any], name: str) -> VideoRef:
        values = given["frames"]
        frames = [self.read(v, f"{name} frame {i}") for i, v in enumerate(values, 1)]
        if len(frames) < 2:
            raise ValueError(f"video {name} has {len(frames)} frames; it must have at least 2")
        if other := next((f for f in frames if f.size != frames[0].size), None):
            raise ValueError(f"video {name} has frames of unequal sizes, such as {other.name}")
        times, seconds = _read_times(given, len(frames), self.video.fps, name)
        self._check_length(seconds, name)
        count = min(len(frames), self.video.max_frames)
        chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
        size, kept = frames[0].size, tuple(frames[i] for i in chosen)
        times = tuple(times[i] for i in chosen)
        return VideoRef(name, size, size, times=times, seconds=seconds, frames=kept)

    def _check_length(self, seconds: float, name: str) -> None:
        if seconds > self.video.max_seconds:
            raise ValueError(
                f"video {name} has {seconds:.0f} seconds, more than "
                f"data.video.max_seconds={self.video.max_seconds:g}"
            )


def _decode_data_url(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        return base64.b64decode(data if head.endswith(";base64") else "?", validate=True)
    except ValueError as error:
        raise ValueError(f"image {url[:40]}… is no data:image/…;base64,… URL: {error}") from error


def _describe(value: Any) -> str:
    """Return a value's type for a message; its repr may have dozens of lines."""
    if value is None or isinstance(value, str):
        return repr(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{name}: use Image.fromarray" if name == "numpy.ndarray" else name


def _read_times(
    given: Mapping[str, Any], count: int, fps: float, name: str
) -> tuple[Sequence[float], float]:
    """Return the times of a clip's frames and its length, in seconds."""
    times = given.get("times")
    if times is None:
        fps = fps if given.get("fps") is None else given["fps"]
        if not isinstance(fps, int | float) or not 0 < fps < 1e4:
            raise ValueError(f"video {name} must have a positive number as fps, not {fps!r}")
        return [index / fps for index in range(count)], count / fps
    numbers = isinstance(times, Sequence) and all(isinstance(t, int | float) for t in times)
    if not numbers or len(times) != count or not (times[0] >= 0 and np.all(np.diff(times) > 0)):
        raise ValueError(f"video {name} must have an ascending time in seconds for each frame")
    return times, times[-1] + (times[-1] - times[0]) / (count - 1)
