"""Videos: what a file says of itself, its frames at given times, and the order of frame files."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,flv,ogg,asf"
"""FFmpeg's names of the accepted formats. It supports more, of which some open other files."""
_INDEXED = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"
"""FFmpeg's names of formats with an index of their key frames."""
_FAR = 1.0  # Seconds between frames from which on the index is used
_MIN_FRAMES = 4  # Frames of a short video file, as in qwen-vl-utils
_SHORT = 1.0  # Seconds by which a stream may be shorter than its header says


def read_shape(source: Path | BinaryIO) -> tuple[tuple[int, int], float, int]:
    """Return a video's size, its frames per second on average, and their number, by its header.

    ``ValueError``: the file is corrupt, has another format, or its header lacks these facts.
    """
    with _open(source) as (container, stream):
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = float((stream.duration or 0) * (stream.time_base or 0))
        seconds = seconds or (container.duration or 0) / 1e6  # in microseconds
        count = stream.frames or round(seconds * fps)
        if stream.codec_context is None:
            raise ValueError("its pictures are encoded in an unknown way: encode it again")
        size = stream.codec_context.width, stream.codec_context.height
        if not (fps > 0 and count > 0 and min(size) > 0):
            raise ValueError("its header gives no frame rate, length or size: encode it again")
        return size, fps, count


def choose_times(total: int, fps: float, most_fps: float, most: int) -> tuple[float, ...]:
    """Choose the frames to take from a video; return their times in seconds.

    They are evenly spaced and even in number: ``most_fps`` per second, and at most ``most``.

    Args:
        total: number of frames in the video, at least 2.
        fps: frames per second of the video.
    """
    # It imports torchvision, and so PyTorch with its compiler: seconds that only clips cost.
    from qwen_vl_utils.vision_process import smart_nframes

    options = {"fps": min(most_fps, fps), "min_frames": _MIN_FRAMES, "max_frames": most}
    chosen = np.linspace(0, total - 1, smart_nframes(options, total, fps)).round()
    return tuple(float(frame) / fps for frame in chosen)


def decode_frames(
    source: Path | BinaryIO,
    times: Sequence[float],
    size: tuple[int, int],
    fit: Callable[[Image.Image], Image.Image] = lambda frame: frame,
) -> list[Image.Image]:
    """Decode the frames that are shown at the given times, which ascend, as RGB.

    Times are seconds from the first frame. ``fit`` resizes each frame as soon as it is decoded: all
    together may fill the memory. ``ValueError``: the file is corrupt, ends before the last time, or
    has frames of another size.
    """
    frames: list[Image.Image] = []
    with _open(source) as (container, stream):
        last, start, time, unit = None, None, 0.0, float(stream.time_base)
        # Half the time between frames where they are even, and less where they are not.
        half = 0.5 / float(max(stream.average_rate or 1, stream.base_rate or 0))

        def get_needed() -> float:
            return (start or 0.0) + times[len(frames)] - half

        for frame in _read_frames(container, stream, get_needed):
            seconds = frame.time
            if container.format.name == "avi":  # It stores decoding times; others are guesses.
                known = frame.dts is not None
                seconds = frame.dts * unit if known else (start or 0.0) + time + 2 * half
            if seconds is None:
                raise ValueError("its frames have no times: encode it again")
            start = seconds if start is None else start
            time = seconds - start
            if (frame.width, frame.height) != size:
                raise ValueError(
                    f"it has a frame of {frame.width}x{frame.height} pixels instead of "
                    f"{size[0]}x{size[1]}"
                )
            while len(frames) < len(times) and time + half > times[len(frames)]:
                shown = frame if last is None or time - half <= times[len(frames)] else last
                frames.append(fit(shown.to_image()))
            if len(frames) == len(times):
                return frames
            last = frame
        end = 0.0 if last is None else time + float((last.duration or 0) * last.time_base)
        if last is None or end + _SHORT < times[-1]:
            raise ValueError(f"it ends before {times[-1]:.1f} seconds: it is incomplete or corrupt")
        return frames + [fit(last.to_image())] * (len(times) - len(frames))


def _read_frames(container: Any, stream: Any, get_needed: Callable[[], float]) -> Iterator[Any]:
    """Yield the frames in their order; where the next one that is needed is far, from the key frame
    before it. ``get_needed`` returns its time in seconds."""
    is_indexed, frames = container.format.name in _INDEXED, container.decode(stream)
    early = 4 / float(stream.average_rate or 1)  # an index may have the times of decoding
    sought = -math.inf
    while (frame := next(frames, None)) is not None:
        yield frame
        needed = get_needed()
        if not is_indexed or frame.time is None or needed - frame.time < _FAR or needed <= sought:
            continue
        last, sought = frame.time, needed
        container.seek(int((needed - early) / stream.time_base), stream=stream)
        frames = container.decode(stream)
        first = next(frames, None)
        if first is None or first.time is None or first.time > needed:
            raise ValueError("its index is wrong: encode it again")
        is_indexed = first.time > last
        if is_indexed:
            frames = chain([first], frames)
        else:  # key frames are rare: what was read already is decoded again, once
            frames = (later for later in frames if later.time > last)


@contextmanager
def _open(source: Path | BinaryIO) -> Iterator[tuple[Any, Any]]:
    av: Any = import_module("av")  # slow to import: only runs with video files wait for it
    try:
        path = str(source) if isinstance(source, Path) else source
        options = {"format_whitelist": CONTAINERS}
        with av.open(path, options=options, metadata_errors="replace") as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.FFmpegError, OSError) as error:  # also for lack of memory: a header may lie
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"it is corrupt or no video: {reason}") from error


def sort_frames(files: Iterable[Path]) -> list[Path]:
    """Sort the images of a video by the numbers in their names: "2.jpg" before "10.jpg"."""

    def get_place(file: Path) -> tuple[Any, ...]:
        parts = re.split(r"([0-9]+)", file.name)  # texts and numbers in turn
        return (*(int(part) if n % 2 else part for n, part in enumerate(parts)), file.name)

    return sorted(files, key=get_place)
