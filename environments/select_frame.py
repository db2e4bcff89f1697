"""A tool that shows one frame of a clip, larger than among the others."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image

from vlm_grpo.media.videos import decode_frames
from vlm_grpo.task.environment import Environment, tool
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Example, ToolCall, VideoRef


class SelectFrame(Environment):
    """Look at single frames of the first clip, whose pixel budget all its frames share.

    A row's ``evidence`` is a list of times in seconds, at which a demonstration looks.

    Attributes:
        min_side: shorter frames are enlarged to this number of pixels; the model's own pixel budget
            of an image holds for what it sees.
    """

    min_side: int = 336

    @tool
    def select_frame(self, seconds: float) -> list[str | Image.Image]:
        """Look at one frame of the video.

        Args:
            seconds: its time from the start of the video.
        """
        clip = _find_clip(self.example)
        if not 0 <= seconds <= clip.seconds:
            raise ToolError(f"the video lasts {clip.seconds:g} seconds")
        if clip.frames:
            time = min(clip.times, key=lambda found: abs(found - seconds))
            frame = clip.frames[clip.times.index(time)].load()
        else:
            time = min(seconds, max(clip.times))  # a file may end before its stated length
            source = clip.path or io.BytesIO(clip.read_bytes())
            (frame,) = decode_frames(source, (time,), clip.size)
        scale = max(1.0, self.min_side / min(frame.size))
        size = round(frame.width * scale), round(frame.height * scale)
        return [f"{time:g} s:", frame.resize(size, Image.Resampling.LANCZOS)]

    def preview(self, example: Example) -> Sequence[str | tuple[int, int]]:
        try:
            width, height = _find_clip(example).size
        except ToolError as error:
            return [str(error)]
        scale = max(1.0, self.min_side / min(width, height))
        return ["100.25 s:", (round(width * scale), round(height * scale))]

    def demonstrate(self, example: Example) -> Sequence[ToolCall]:
        times = example.meta.get("evidence", ())
        return [ToolCall("select_frame", {"seconds": time}) for time in times]


def _find_clip(example: Example) -> VideoRef:
    for image in example.images:
        if isinstance(image, VideoRef):
            return image
    raise ToolError("there is no video")
