"""``vlm-grpo data``: inspect a dataset before it is used for training or evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.run import DataSettings

app = typer.Typer(
    help="Inspect a dataset before it is used for training or evaluation.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _data() -> None:
    """Keep the name of the command ``check``: typer drops the name of a single command."""


Source = Annotated[
    str, typer.Argument(metavar="DATA", help="Examples: .jsonl, .parquet, hf:… or embedded:….")
]
TaskOfRows = Annotated[str, typer.Option(help="Task of the rows: a name or a .py file.")]
Against = Annotated[
    str | None, typer.Option(help="Another source, which must share no image with DATA.")
]
ImageRoot = Annotated[
    Path | None, typer.Option(help="Folder of the images; default: the folder of the data file.")
]
AgainstRoot = Annotated[
    Path | None, typer.Option(help="Folder of the images of --against; default: that of DATA.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Number of rows to check; default: all.")]
TokenSide = Annotated[
    int | None,
    typer.Option(help="Pixels per side of an image token: 28 for Qwen2(.5)-VL, 32 for Qwen3-VL."),
]
MaxPixels = Annotated[
    int, typer.Option(help="Pixel budget of the model, for counting image tokens.")
]


@app.command()
def check(
    source: Source,
    task: TaskOfRows,
    against: Against = None,
    image_root: ImageRoot = None,
    against_root: AgainstRoot = None,
    limit: Limit = None,
    token_side: TokenSide = None,
    max_pixels: MaxPixels = 12_845_056,
) -> None:
    """Find bad rows, unreadable images, boxes outside the image, duplicates and shared images.

    \b
    vlm-grpo data check train.jsonl --task grounding --image-root train2014
    vlm-grpo data check train.jsonl --task grounding --against test.jsonl
    vlm-grpo data check embedded:counting --task counting --token-side 28

    Exits with status 2 if something is wrong, or if DATA and --against share an image.
    """
    from vlm_grpo.data.checks import (
        check_source,
        find_shared_images,
        format_overlap,
        format_report,
    )
    from vlm_grpo.registry import load_task

    loaded = load_task(task)
    tokens = None if token_side is None else _build_token_counter(token_side, max_pixels)
    report = check_source(source, loaded, _data_settings(source, image_root, limit), tokens)
    for line in format_report(report):
        typer.echo(line)
    passed = report.passed
    if against is not None:
        settings = _data_settings(against, against_root or image_root, limit)
        other = check_source(against, loaded, settings, tokens)
        for line in (*format_report(other), *format_overlap(report, other)):
            typer.echo(line)
        passed = passed and other.passed and not find_shared_images(report, other)
    if not passed:
        raise UserError("the data are not sound: see above")


def _data_settings(source: str, image_root: Path | None, limit: int | None) -> DataSettings:
    from vlm_grpo.config.run import DataSettings

    root = None if source.startswith("embedded:") else image_root
    return DataSettings(train=source, eval=source, image_root=root, eval_limit=limit)


def _build_token_counter(side: int, max_pixels: int) -> Callable[[tuple[int, int]], int]:
    """Build a function from an image's size to its number of tokens under Qwen-VL's resize."""
    from qwen_vl_utils.vision_process import smart_resize

    def count(size: tuple[int, int]) -> int:
        width, height = size
        smallest = 4 * side * side
        rows, columns = smart_resize(height, width, side, smallest, max(max_pixels, smallest))
        return rows * columns // (side * side)

    return count
