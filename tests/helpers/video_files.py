"""Small video files."""

from __future__ import annotations

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
) -> bytes:
    """Encode a video whose frame number n has a gray level of 10 · n.

    Its frames are shown one after the other, or from ``places[n] / fps`` seconds.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        output.metadata["title"] = TITLE
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * number, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if places is not None:
                frame.pts, frame.time_base = places[number], Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def level(frame: Any) -> int:
    """Return the number of a frame of ``make_video``."""
    return round(float(np.asarray(frame).mean()) / 10)
