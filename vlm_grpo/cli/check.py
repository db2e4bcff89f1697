"""``vlm-grpo check``: check a task and its data, and draw rows, without a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlm_grpo.cli.common import parse_task_options
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.data import DataSettings
    from vlm_grpo.config.prompt import PromptSettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.model.prompts import PromptBuilder
    from vlm_grpo.task import Task
    from vlm_grpo.types import Example


def check(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of a task, or a .py file.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTION=VALUE",
            help="Options of the task, and settings: tags=true, data.columns.answer=label.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples: a file or folder, hf:NAME[:SPLIT[:CONFIG]] or embedded:NAME; default: "
            "the embedded data of the task's name."
        ),
    ] = None,
    split: Annotated[
        Literal["train", "eval"], typer.Option(help="Part of a source that has several.")
    ] = "eval",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to check; default: all.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another source, which must share no image and no id with --data."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub name of a model, or embedded: build every prompt for it, without "
            "its weights."
        ),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(
            help="Page (.html) to draw the first rows in, as the model (default: embedded) gets "
            "them: prompt, image tokens, gold answer."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows in --preview.")] = 4,
    data_only: Annotated[
        bool, typer.Option("--data-only", help="Do not score gold answers and exploits.")
    ] = False,
) -> None:
    """Check a task and its data without a model, or with a model's processor.

    First the data: bad rows, unreadable images, prompts that cannot be
    written, duplicates, and images and ids that --against shares. With --model, every prompt is
    built as in training, and must fit into the context. If the data are sound, then the task: every
    gold answer must earn the full reward, or what rounded coordinates leave of it for small boxes,
    an empty text 0, and known exploits of a reward no more than their bound. Settings of the
    prompt, the data and the policy are written among the options.

    \b
    vlm-grpo check counting
    vlm-grpo check my_task.py tags=true --data train.jsonl --against test.jsonl
    vlm-grpo check grounding --data train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo check ocr data.columns.answer=label --data train.parquet --preview rows.html --limit 4
    vlm-grpo check counting 'prompt.template={{ question }} Count twice.'

    Exits with status 2 if something is wrong, or if --data and --against share an image or an id.
    """
    from vlm_grpo.config.run import EMBEDDED, Settings
    from vlm_grpo.data.report import DataReport, check_source, describe_overlap
    from vlm_grpo.task.registry import load_task
    from vlm_grpo.task.soundness import check_task

    if preview is not None and preview.suffix != ".html":
        raise UserError(f"--preview {preview}: give a file with the suffix .html")
    source = data or f"embedded:{task}"
    values = parse_task_options(options)
    blocks = {name: values.pop(name, {}) for name in ("prompt", "data", "policy")}
    given = {f"{split}_limit": limit, **blocks.pop("data")}

    def build_settings(source: str, **own: Any) -> Settings:
        data = {"train": source, "eval": source, **given, **own}
        return Settings(task="any", model=model or EMBEDDED, data=data, **blocks)

    settings = build_settings(source)
    loaded = load_task(task, **values)
    if data is None and task not in ("counting", "grounding", "ocr"):
        raise UserError(f"task {task} has no embedded data: give its data by --data")
    builder = None if model is None else _load_prompts(settings)
    if builder is not None:
        loaded = builder.adapt(loaded)
    measure = partial(_measure, settings.prompt, builder)

    def report_on(name: str, settings: DataSettings) -> DataReport:
        report = check_source(name, loaded, settings, measure, split)
        typer.echo("\n".join(report.describe()))
        return report

    report = report_on(source, settings.data)
    passed = report.passed
    if against is not None:
        own = {"image_root": None} if against.startswith("embedded:") else {}
        other = report_on(against, build_settings(against, **own).data)
        overlap = describe_overlap(report, other)
        apart = f"{source} and {against} have no image and no id in common"
        if report.examples and other.examples:
            typer.echo("\n".join(overlap) or apart)
        passed = passed and other.passed and not overlap
    if preview is not None:
        from vlm_grpo.cli.preview import preview_rows

        shown = builder or _load_prompts(settings)
        for line in preview_rows(preview, report.examples[:rows], shown.adapt(loaded), shown):
            typer.echo(line)
    if not passed:
        raise UserError("the data are not sound: see above")
    if not data_only:
        examples = report.examples
        if builder is not None:
            examples = [builder.with_resized_sizes(example) for example in examples]
        for line in check_task(loaded, examples):
            typer.echo(line)


def _load_prompts(settings: Settings) -> PromptBuilder:
    from vlm_grpo.model.loading import load_prompt_builder

    return load_prompt_builder(settings)


def _measure(
    prompt: PromptSettings, builder: PromptBuilder | None, examples: Sequence[Example], task: Task
) -> tuple[list[int] | None, list[str]]:
    """Write every prompt, as text or as the model's tokens, whose numbers are returned."""
    lengths, problems = [], []
    for example in examples:
        try:
            if builder is None:
                prompt.write_chat(example, task)
            else:
                built = builder.build(builder.with_resized_sizes(example), task)
                lengths.append(len(built.token_ids))
        except UserError as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(f"{example.name}: {error}")
    return None if builder is None else lengths, problems
