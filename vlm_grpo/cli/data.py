"""``vlm-grpo data``: look at a dataset before a model is trained or measured on it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data.checks import check_source, find_shared_images, format_overlap, format_report
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task

app = typer.Typer(
    help="Look at a dataset before a model is trained or measured on it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _data() -> None:
    """A callback keeps the commands' names, also while there is only one."""


@app.command()
def check(
    source: Annotated[
        str, typer.Argument(metavar="DATA", help="Examples: .jsonl, .parquet, hf:… or embedded:….")
    ],
    task: Annotated[str, typer.Option(help="Which task's rows they are; name or .py file.")],
    against: Annotated[
        str | None, typer.Option(help="Another source that must share no picture with it.")
    ] = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder of the images; without it the data file's folder.")
    ] = None,
    against_root: Annotated[
        Path | None, typer.Option(help="The same for --against; without it that of DATA.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Look at the first so many rows.")] = None,
    token_side: Annotated[
        int | None,
        typer.Option(help="Pixels of an image token's side: 28 for Qwen2(.5)-VL, 32 for Qwen3-VL."),
    ] = None,
    max_pixels: Annotated[
        int, typer.Option(help="The model's pixel budget, for counting image tokens.")
    ] = 12_845_056,
) -> None:
    """Find bad rows, dead images, boxes outside, copies, and what train and test share.

    \b
    vlm-grpo data check train.jsonl --task grounding --image-root train2014
    vlm-grpo data check train.jsonl --task grounding --against test.jsonl
    vlm-grpo data check embedded:counting --task counting --token-side 28

    Exit status 2 where something is wrong or where DATA and --against share a picture.
    """
    loaded = load_task(task)
    tokens = None if token_side is None else _token_counter(token_side, max_pixels)
    settings = _settings(source, image_root, limit)
    report = check_source(source, loaded, settings, tokens)
    for line in format_report(report):
        typer.echo(line)
    shared = False
    if against is not None:
        root = against_root or image_root
        other = check_source(against, loaded, _settings(against, root, limit), tokens)
        for line in (*format_report(other), *format_overlap(report, other)):
            typer.echo(line)
        shared = bool(find_shared_images(report, other)) or not other.passed
    if shared or not report.passed:
        raise UserError("the data are not sound: see above")


def _settings(source: str, image_root: Path | None, limit: int | None) -> DataSettings:
    root = None if source.startswith("embedded:") else image_root
    return DataSettings(train=source, eval=source, image_root=root, eval_limit=limit)


def _token_counter(side: int, max_pixels: int):
    """Image tokens of an image, by Qwen-VL's own resize."""
    smart_resize = importlib.import_module("qwen_vl_utils.vision_process").smart_resize  # slow

    def count(size: tuple[int, int]) -> int:
        width, height = size
        smallest = 4 * side * side
        rows, columns = smart_resize(height, width, side, smallest, max(max_pixels, smallest))
        return rows * columns // (side * side)

    return count
