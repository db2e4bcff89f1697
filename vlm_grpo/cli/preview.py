"""The first rows of a dataset exactly as a model gets them: as text, and as a picture or a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import indent, shorten

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.media.images import encode_data_url, encode_png
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task import Task
from vlm_grpo.task.drawing import GOLD_COLOR, draw_caption
from vlm_grpo.types import Example, Prompt
from vlm_grpo.utils.atomic_io import write_atomic

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .7rem; overflow-wrap: anywhere }
img { max-width: 100%; border: 1px solid #ccc } figure { margin: 0 0 .7rem }
"""


@dataclass(frozen=True)
class Preview:
    """One example as a model gets it."""

    prompt: Prompt  # the prompt, as training builds it
    gold: str  # the completion that states the gold answer
    # the images at the size that the model sees, the gold answer drawn on the first
    pictures: Sequence[Image.Image]
    text: str  # the sizes and tokens of the images, the prompt and the gold answer


def preview_rows(
    path: Path, examples: Sequence[Example], task: Task, prompts: PromptBuilder
) -> Iterator[str]:
    """Yield examples as text, and draw them in a page (.html) or a picture."""
    previews = []
    for example in examples:
        previews.append(build_preview(example, task, prompts))
        yield f"{example.name}\n{indent(previews[-1].text, '  ')}\n"
    if previews:
        content = _build_page(previews) if path.suffix == ".html" else _draw_sheet(previews)
        try:
            write_atomic(path, content)
        except OSError as error:
            raise UserError(f"--preview {path} cannot be written: {error.strerror}") from error
        yield f"{len(previews)} rows drawn in {path}"


def build_preview(example: Example, task: Task, prompts: PromptBuilder) -> Preview:
    pictures, lines = [], []
    try:
        example = prompts.with_resized_sizes(example)
        prompt = prompts.build(example, task)
        for image in example.images:
            picture = image.load()
            if image is task.target_image(example):
                picture = task.draw(picture, task.gold_answer(example), example, GOLD_COLOR)
            pictures.append(picture if image.num_frames else picture.resize(image.resized_size))
    except ValueError as error:
        raise UserError(f"{example.name}: {error}") from error
    for image in example.images:
        (width, height), (new_width, new_height) = image.size, image.resized_size
        frames = f"{image.num_frames} frames of " if image.num_frames else ""
        tokens = prompts.family.count_tokens(image, prompts.processor)
        lines.append(
            f"{image.kind} {image.name}: {frames}{width}x{height}, seen as {new_width}x{new_height}"
            + f", {tokens} tokens" * bool(tokens)
        )
    gold = task.gold(example)
    lines += [f"prompt, {len(prompt.token_ids)} tokens:", indent(prompt.text, "  ")]
    answer = shorten(repr(example.answer), 200)
    lines += [f"gold answer {answer}, which a model should write as:", indent(gold, "  ")]
    return Preview(prompt, gold, pictures, "\n".join(lines))


def _build_page(previews: Sequence[Preview]) -> bytes:
    parts = ["<!doctype html><meta charset=utf-8><title>Preview</title>"]
    parts.append(f"<style>{_STYLE}</style>")
    for preview in previews:
        parts.append(f"<h2>{escape(preview.prompt.example.name)}</h2>")
        for picture in preview.pictures:
            parts.append(f'<figure><img src="{encode_data_url(picture)}" alt=""></figure>')
        parts.append(f"<pre>{escape(preview.text)}</pre>")
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _draw_sheet(previews: Sequence[Preview]) -> bytes:
    cells = []
    for preview in previews:
        example = preview.prompt.example
        caption = f"{example.id}: {example.question}\ngold: {preview.gold}"
        pictures = preview.pictures or [Image.new("RGB", (320, 1), "white")]
        cells += [*pictures[1:], draw_caption(pictures[0], caption, "black")]
    width, gap = max(cell.width for cell in cells), 12
    sheet = Image.new("RGB", (width, sum(cell.height + gap for cell in cells)), "white")
    top = 0
    for cell in cells:
        sheet.paste(cell, (0, top))
        top += cell.height + gap
    return encode_png(sheet)
