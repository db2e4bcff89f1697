"""``vlm-grpo data``: inspect a dataset before it is used for training or evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_grpo.cli.common import (
    ImageRoot,
    MaxPixels,
    ModelName,
    load_model_prompts,
    load_prompts,
    parse_data_options,
)
from vlm_grpo.errors import UserError, bullets

if TYPE_CHECKING:
    from vlm_grpo.config.data import Split
    from vlm_grpo.types import ImageRef

app = typer.Typer(
    help="Inspect a dataset before it is used for training or evaluation.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_QWEN_MAX_PIXELS = 12_845_056
"""Default pixel budget of Qwen2-VL and Qwen2.5-VL."""

Source = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Examples: a file or folder, hf:… or embedded:…."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OPTION=VALUE",
        help="Options of the task, and settings: tags=true, data.columns.answer=label.",
    ),
]
SplitName = Annotated[
    str, typer.Option("--split", help="Part of a source that has several: train or eval.")
]
TaskOfRows = Annotated[str, typer.Option(help="Task of the rows: a name or a .py file.")]
Against = Annotated[
    str | None, typer.Option(help="Another source, which must share no image and no id with DATA.")
]
AgainstRoot = Annotated[
    Path | None, typer.Option(help="Folder of the images of --against; default: that of DATA.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Number of rows to check; default: all.")]
TokenSide = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Count image tokens without a model: pixels per side of an image token, 28 for "
        "Qwen2(.5)-VL, 32 for Qwen3-VL.",
    ),
]


@app.command()
def check(
    source: Source,
    task: TaskOfRows,
    options: Words = None,
    split: SplitName = "eval",
    against: Against = None,
    image_root: ImageRoot = None,
    against_root: AgainstRoot = None,
    limit: Limit = None,
    model: ModelName = None,
    token_side: TokenSide = None,
    max_pixels: MaxPixels = None,
) -> None:
    """Find bad rows, unreadable images, boxes outside the image, duplicates and shared images.

    \b
    vlm-grpo data check train.jsonl --task grounding --image-root train2014
    vlm-grpo data check train.jsonl --task grounding --against test.jsonl
    vlm-grpo data check embedded:counting --task counting --model embedded
    vlm-grpo data check coco/annotations/instances_val2017.json several=true --task grounding

    Exits with status 2 if something is wrong, or if DATA and --against share an image or an id.
    """
    from vlm_grpo.data.checks import (
        Measures,
        check_source,
        find_overlap,
        format_overlap,
        format_report,
    )
    from vlm_grpo.task.registry import load_task

    part = _check_split(split)
    limits = {f"{part}_limit": limit}
    values, prompt, settings = parse_data_options(options, source, image_root=image_root, **limits)
    loaded = load_task(task, **values)
    tokens = None if token_side is None else _build_token_counter(token_side, max_pixels)
    prompts = load_prompts(model, max_pixels, settings, prompt)
    measures = Measures(tokens, None if prompts is None else prompts.measure)
    sources = [(source, settings)]
    if against is not None:
        root = against_root or image_root
        sources.append(
            (against, parse_data_options(options, against, image_root=root, **limits)[2])
        )
    reports = []
    for name, data in sources:
        reports.append(check_source(name, loaded, data, measures, part))
        for line in format_report(reports[-1]):
            typer.echo(line)
    passed = all(report.passed for report in reports)
    if against is not None:
        overlap = find_overlap(*reports)
        for line in format_overlap(overlap):
            typer.echo(line)
        passed = passed and not overlap.found
    if not passed:
        raise UserError("the data are not sound: see above")


@app.command()
def preview(
    source: Source,
    task: TaskOfRows,
    options: Words = None,
    split: SplitName = "train",
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 4,
    out: Annotated[Path, typer.Option(help="Page (.html) or picture (.png) to write.")] = Path(
        "preview.html"
    ),
    image_root: ImageRoot = None,
    model: Annotated[
        str, typer.Option(help="Folder or Hub name of a model, or embedded; no weights are loaded.")
    ] = "embedded",
    max_pixels: MaxPixels = None,
) -> None:
    """Show the first rows as the model gets them: prompt, image tokens, gold answer, drawing.

    The prompts are built by the code of training, with the model's processor and chat template.

    \b
    vlm-grpo data preview embedded:grounding --task grounding
    vlm-grpo data preview data.yaml --task counting --model Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo data preview train.parquet data.columns.answer=label --task ocr --out rows.png

    Exits with status 2 if one of these rows is bad.
    """
    from vlm_grpo.cli.preview import build_preview, write_previews
    from vlm_grpo.data.loading import read_examples
    from vlm_grpo.task.registry import load_task

    part = _check_split(split)
    limits = {f"{part}_limit": rows}
    values, prompt, settings = parse_data_options(options, source, image_root=image_root, **limits)
    prompts = load_model_prompts(model, max_pixels, settings, prompt)
    loaded = prompts.adapt(load_task(task, **values))
    examples, problems = read_examples(source, loaded, settings, part)
    previews = []
    for example in examples:
        previews.append(build_preview(example, loaded, prompts))
        typer.echo("\n".join(previews[-1].describe()) + "\n")
    if previews:
        write_previews(out, previews)
        typer.echo(f"{len(previews)} rows drawn in {out}")
    if problems or not previews:
        raise UserError(f"{len(problems)} bad rows:\n{bullets(problems)}")


def _check_split(split: str) -> Split:
    if split not in ("train", "eval"):
        raise UserError(f"--split {split}: give train or eval")
    return split


def _build_token_counter(side: int, max_pixels: int | None) -> Callable[[ImageRef], int]:
    """Build a function that counts an image's or a clip's tokens under Qwen-VL's resize."""
    most = max_pixels or _QWEN_MAX_PIXELS
    from qwen_vl_utils.vision_process import smart_resize

    from vlm_grpo.config.policy import PolicySettings

    of_clip = PolicySettings.model_fields["max_video_pixels"].default

    def count(image: ImageRef) -> int:
        (width, height), frames = image.size, max(1, image.num_frames)
        smallest = 4 * side * side
        share = min(most, of_clip // frames) if image.num_frames else most
        rows, columns = smart_resize(height, width, side, smallest, max(share, smallest))
        return rows * columns // (side * side) * math.ceil(frames / 2)

    return count
