"""Small video files."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

TITLE = "A small video"


def make_video(
    count: int = 20,
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    container: str = "mp4",
    places: Sequence[int] | None = None,
    codec: str = "mpeg4",
    gop: tuple[int, int] | None = None,
) -> bytes:
    """Encode a video whose frame n has a gray level of 10 · (n modulo 25), one after the other or
    from ``places[n] / fps`` seconds. ``gop``: the largest numbers of frames from one key frame to
    the next, and of B-frames in a row."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=fps)
        if gop is not None:
            stream.codec_context.gop_size, stream.codec_context.max_b_frames = gop
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        output.metadata["title"] = TITLE
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * (number % 25), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if places is not None:
                frame.pts, frame.time_base = places[number], Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def level(frame: Any) -> int:
    """Return the number of a frame of ``make_video``."""
    return round(float(np.asarray(frame).mean()) / 10)
