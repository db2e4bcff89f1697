"""The first rows of a dataset exactly as a model gets them: as text, and as a picture or a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from textwrap import shorten

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.media.image_decode import encode_data_url
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task import Task
from vlm_grpo.task.drawing import GOLD_COLOR, draw_caption
from vlm_grpo.types import Example, Prompt
from vlm_grpo.utils.atomic_io import write_atomic

OUTPUTS = (".html", ".png")
"""Suffixes of the files that a preview can be written to."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .7rem; overflow-wrap: anywhere }
img { max-width: 100%; border: 1px solid #ccc } figure { margin: 0 0 .7rem }
"""


@dataclass(frozen=True)
class Preview:
    """One example as a model gets it.

    Attributes:
        prompt: the prompt, as training builds it.
        gold: the completion that states the gold answer.
        pictures: the images at the size that the model sees, the gold answer drawn on the first.
        image_tokens: number of tokens of each image; 0: unknown.
    """

    prompt: Prompt
    gold: str
    pictures: Sequence[Image.Image]
    image_tokens: Sequence[int]

    def describe(self) -> Iterator[str]:
        """Yield the lines that the command line prints."""
        example = self.prompt.example
        yield example.name
        for image, tokens in zip(example.images, self.image_tokens, strict=True):
            (width, height), (new_width, new_height) = image.size, image.resized_size
            sizes = f"{width}x{height}, seen as {new_width}x{new_height}"
            if image.num_frames:
                sizes = f"{image.num_frames} frames of {sizes}"
            yield f"  {image.kind} {image.name}: {sizes}" + f", {tokens} tokens" * bool(tokens)
        yield f"  prompt, {len(self.prompt.token_ids)} tokens:"
        yield from (f"    {line}" for line in self.prompt.text.splitlines())
        yield f"  gold answer {shorten(repr(example.answer), 200)}, which a model should write as:"
        yield from (f"    {line}" for line in self.gold.splitlines())


def build_preview(example: Example, task: Task, prompts: PromptBuilder) -> Preview:
    """Build the preview of one example.

    Raises:
        UserError: its prompt cannot be built.
    """
    try:
        example = prompts.with_resized_sizes(example)
    except ValueError as error:
        raise UserError(f"{example.name}: {error}") from error
    prompt = prompts.build(example, task)
    pictures = []
    for image in example.images:
        picture = image.load()
        if image is task.target_image(example):
            picture = task.draw(picture, task.gold_answer(example), example, GOLD_COLOR)
        pictures.append(picture if image.num_frames else picture.resize(image.resized_size))
    counts = [prompts.family.count_tokens(i, prompts.processor) for i in example.images]
    return Preview(prompt, task.gold(example), pictures, counts)


def write_previews(path: Path, previews: Sequence[Preview]) -> None:
    """Write previews to a page (.html) or a picture (.png).

    Raises:
        UserError: the file has another suffix, or cannot be written.
    """
    if path.suffix not in OUTPUTS:
        raise UserError(f"--out {path}: give a file with the suffix {' or '.join(OUTPUTS)}")
    content = _build_page(previews) if path.suffix == ".html" else _draw_sheet(previews)
    try:
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from error


def _build_page(previews: Sequence[Preview]) -> bytes:
    parts = [
        "<!doctype html><meta charset=utf-8><title>Preview</title>",
        f"<style>{_STYLE}</style>",
    ]
    for preview in previews:
        head, *lines = preview.describe()
        parts.append(f"<h2>{escape(head)}</h2>")
        for picture in preview.pictures:
            parts.append(f'<figure><img src="{encode_data_url(picture)}" alt=""></figure>')
        text = escape("\n".join(line[2:] for line in lines))
        parts.append(f"<pre>{text}</pre>")
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _draw_sheet(previews: Sequence[Preview]) -> bytes:
    """Draw all previews below each other, each with its question and gold answer."""
    cells = []
    for preview in previews:
        example = preview.prompt.example
        caption = f"{example.id}: {example.question}\ngold: {preview.gold}"
        pictures = preview.pictures or [Image.new("RGB", (320, 1), "white")]
        cells += pictures[1:]
        cells.append(draw_caption(pictures[0], caption, "black"))
    width, gap = max(cell.width for cell in cells), 12
    sheet = Image.new("RGB", (width, sum(cell.height + gap for cell in cells)), "white")
    top = 0
    for cell in cells:
        sheet.paste(cell, (0, top))
        top += cell.height + gap
    file = BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()
