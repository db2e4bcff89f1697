"""The picture that shows a video: its frames side by side."""

from collections.abc import Sequence

from PIL import Image

STRIP_FRAMES = 8  #: Largest number of frames side by side
_STRIP_WIDTH = 320  # Largest width of a frame in a strip, in pixels


def fit_strip(size: tuple[int, int], count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of a strip of ``count`` frames of a size, and the size of a frame in it."""
    width = min(size[0], _STRIP_WIDTH)
    frame = width, max(1, round(size[1] * width / size[0]))
    return (width * min(count, STRIP_FRAMES), frame[1]), frame


def build_strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Return frames side by side, from the first to the last; of many, evenly spaced ones."""
    size, (width, height) = fit_strip(frames[0].size, len(frames))
    shown = size[0] // width
    strip = Image.new("RGB", size)
    for place in range(shown):
        frame = frames[(2 * place + 1) * len(frames) // (2 * shown)]
        strip.paste(frame.resize((width, height)), (place * width, 0))
    return strip
