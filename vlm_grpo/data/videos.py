"""Locating and measuring the clips of a dataset without decoding them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from qwen_vl_utils.vision_process import smart_nframes

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.data.images import IMAGE_SUFFIXES, ImageReader
from vlm_grpo.media.video_decode import read_shape
from vlm_grpo.types import FileSlice, ImageRef, VideoRef

VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv"),
    *(".asf", ".wmv"),
)
"""Suffixes by which files and columns of clips are recognized."""
_MIN_FRAMES = 4
"""Frames of a short video file, as in qwen-vl-utils."""


@dataclass(frozen=True)
class Clip:
    """A clip of a row, not yet read.

    Attributes:
        value: a path or the bytes of a video file, the path of a folder of frames, a list of
            frames, or ``{"frames": […], "fps": …}`` or ``{"frames": […], "times": […]}``.
    """

    value: Any


class VideoReader(ImageReader):
    """A reader of the images and clips in a dataset's rows, which opens each file once.

    Args:
        roots, max_pixels: as for ``ImageReader``; a limit on the pixels of each frame.
        settings: which frames are taken, and the limit on the length.
    """

    def __init__(
        self, roots: Path | Sequence[Path] | None, max_pixels: int, settings: VideoSettings
    ) -> None:
        super().__init__(roots, max_pixels)
        self.settings = settings

    def read(self, value: Any, name: str) -> ImageRef:
        """Return a reference to an image or ``Clip`` after reading its header.

        Args:
            value: the clip, or a value as for ``ImageReader``.
            name: name for messages of what has no path.

        Raises:
            ValueError: it is missing, unreadable, too large or too long, or outside the folders.
        """
        if isinstance(value, Clip):
            return self._read_clip(value.value, name)
        return super().read(value, name)

    def _read_clip(self, value: Any, name: str) -> ImageRef:
        if isinstance(value, Mapping) and "frames" not in value:
            value = value.get("bytes") or value.get("path") or value.get("video")
        if isinstance(value, str | Path) and str(value):
            return self._read_once("video", str(value), self._read_located)
        if isinstance(value, bytes | FileSlice):
            return self._read_stream(value, name)
        given = value if isinstance(value, Mapping) else {"frames": value}
        if not isinstance(given["frames"], list | tuple):
            raise ValueError(
                "a video must be a path, encoded bytes, a list of frames or an object with "
                f"frames, not {type(given['frames']).__name__}"
            )
        return self._read_frames(given, name)

    def _read_located(self, name: str) -> VideoRef:
        path = self.locate(name, "video")
        if path.is_file():
            return self._read_stream(path, name)
        try:
            files = [file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
        except OSError as error:
            raise ValueError(f"video {name} cannot be read: {error}") from error
        frames = [str(file) for file in sorted(files, key=_get_place)]
        return self._read_frames({"frames": frames}, name)

    def _read_stream(self, source: Path | bytes | FileSlice, name: str) -> VideoRef:
        path = source if isinstance(source, Path) else None
        data = None if isinstance(source, Path) else source
        try:
            content = data.read() if isinstance(data, FileSlice) else data
            shape = read_shape(path or io.BytesIO(content or b""))
        except ValueError as error:
            raise ValueError(f"video {name} cannot be read: {error}") from error
        self.check_pixels(shape.size, name)
        seconds, limits = shape.count / shape.fps, self.settings
        self._check_length(seconds, name)
        options = {
            "fps": min(limits.fps, shape.fps),
            "min_frames": min(_MIN_FRAMES, limits.max_frames),
            "max_frames": limits.max_frames,
        }
        if shape.count < 2:
            raise ValueError(f"video {name} has one frame: give it as an image")
        count = smart_nframes(options, shape.count, shape.fps)
        chosen = np.linspace(0, shape.count - 1, count).round()
        times = tuple(float(frame) / shape.fps for frame in chosen)
        return VideoRef(name, shape.size, shape.size, path, data, times=times, seconds=seconds)

    def _read_frames(self, given: Mapping[str, Any], name: str) -> VideoRef:
        values = given["frames"]
        frames = [self.read(v, f"{name} frame {i}") for i, v in enumerate(values, 1)]
        if len(frames) < 2:
            raise ValueError(f"video {name} has {len(frames)} frames; it must have at least 2")
        if other := next((f for f in frames if f.size != frames[0].size), None):
            raise ValueError(f"video {name} has frames of unequal sizes, such as {other.name}")
        times, seconds = _read_times(given, len(frames), self.settings.fps, name)
        self._check_length(seconds, name)
        count = min(len(frames), self.settings.max_frames)
        chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
        kept: tuple[ImageRef, ...] = tuple(frames[i] for i in chosen)
        size = frames[0].size
        times = tuple(times[i] for i in chosen)
        return VideoRef(name, size, size, times=times, seconds=seconds, frames=kept)

    def _check_length(self, seconds: float, name: str) -> None:
        if seconds > self.settings.max_seconds:
            raise ValueError(
                f"video {name} has {seconds:.0f} seconds, more than "
                f"data.video.max_seconds={self.settings.max_seconds:g}"
            )


def _get_place(file: Path) -> tuple[Any, ...]:
    """Return the key by which frames are sorted: "2.jpg" comes before "10.jpg"."""
    parts = re.split(r"([0-9]+)", file.name)  # texts and numbers in turn
    return (*(int(part) if index % 2 else part for index, part in enumerate(parts)), file.name)


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
