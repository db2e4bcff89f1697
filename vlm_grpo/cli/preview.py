"""The first rows of a dataset exactly as a model gets them: as text, and as a page."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from textwrap import indent, shorten

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.media.images import encode_data_url
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task import Task
from vlm_grpo.task.drawing import GOLD_COLOR
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import write_atomic

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .7rem; overflow-wrap: anywhere }
img { max-width: 100%; border: 1px solid #ccc } figure { margin: 0 0 .7rem }
"""


def preview_rows(
    path: Path, examples: Sequence[Example], task: Task, prompts: PromptBuilder
) -> Iterator[str]:
    """Yield examples as text, and draw them in a page."""
    parts = ["<!doctype html><meta charset=utf-8><title>Preview</title>"]
    parts.append(f"<style>{_STYLE}</style>")
    for example in examples:
        text, pictures = build_preview(example, task, prompts)
        parts.append(f"<h2>{escape(example.name)}</h2>")
        for picture in pictures:
            parts.append(f'<figure><img src="{encode_data_url(picture)}" alt=""></figure>')
        parts.append(f"<pre>{escape(text)}</pre>")
        yield f"{example.name}\n{indent(text, '  ')}\n"
    if examples:
        try:
            write_atomic(path, "\n".join(parts).encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise UserError(f"--preview {path} cannot be written: {error.strerror}") from error
        yield f"{len(examples)} rows drawn in {path}"


def build_preview(
    example: Example, task: Task, prompts: PromptBuilder
) -> tuple[str, list[Image.Image]]:
    """Return the sizes and tokens of the images, the prompt as training builds it and the gold
    answer; and the images at the size that the model sees, the answer drawn on the first."""
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
    lines += [f"prompt, {len(prompt.token_ids)} tokens:", indent(prompt.text, "  ")]
    answer = shorten(repr(example.answer), 200)
    lines += [f"gold answer {answer}, which a model should write as:"]
    return "\n".join([*lines, indent(task.gold(example), "  ")]), pictures
