"""``vlm-grpo evaluate``: score a model on held-out examples or on a public benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlm_grpo.cli.common import (
    ApiKeyEnv,
    Concurrency,
    FrameName,
    ImageRoot,
    Overrides,
    Price,
    RecipeTask,
    ServedModelName,
    ServerUrl,
    Timeout,
    add_task_override,
    build_endpoint,
    exit_when_stopped,
    get_frame,
    parse_task_options,
)
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.data import DataSettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.eval.scored import Scored
    from vlm_grpo.serve.chat import Endpoint
    from vlm_grpo.task import Task
    from vlm_grpo.task.coordinates import CoordinateFrame

_NO_MODEL = "model=none"
"""Override of an evaluation for which no model must be named."""
_MAX_TABLE_ROWS = 50

CHECKPOINT_SETTINGS = {"model", "model_revision", "task_options", "policy", "rollout", "evaluation"}
"""Settings that the evaluation of a checkpoint on a benchmark takes from its training."""

Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="RUN", help="A run, whose newest checkpoint it is, RUN@step, RUN@best, or a folder."
    ),
]


def evaluate(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|BENCHMARK|TASK",
            help="A recipe; with --data a benchmark; with --predictions also a task.",
        ),
    ],
    overrides: Overrides = None,
    task: RecipeTask = None,
    checkpoint: Checkpoint = None,
    data: Annotated[
        str | None,
        typer.Option(help="Rows of the benchmark, as its converter wrote them, or of the task."),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Outputs to score instead of running a model.")
    ] = None,
    frame: FrameName = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of --predictions: predictions (the default: JSON Lines of id and output), "
            "or the output of an evaluation by vlm_r1, r1_v or lmms_eval.",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split whose published results to print for comparison.")
    ] = None,
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    price: Price = None,
    tags: Annotated[
        bool | None,
        typer.Option(
            help="With a task: read answers from <answer> tags only, or from the full output only; "
            "default: from the tags of outputs that have them."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With a task: print one JSON object per row.")
    ] = False,
    image_root: ImageRoot = None,
) -> None:
    """Score a model on held-out examples, with n and a 95 % interval.

    With --data the score is the official metric of a public benchmark (docs/benchmarks.md lists
    them), and a checkpoint is compared with its base model, example by example. An interrupted
    evaluation resumes from its saved outputs. With a task and --predictions, the outputs of any
    model are scored by the task's rewards and metrics.

    \b
    vlm-grpo evaluate counting                                        the recipe's model
    vlm-grpo evaluate counting --checkpoint runs/counting             its newest checkpoint
    vlm-grpo evaluate counting --checkpoint counting@best             its best one
    vlm-grpo evaluate runs/counting/config.yaml --checkpoint DIR data.eval=test.jsonl
    vlm-grpo evaluate refcoco --data val.jsonl --split val model=Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo evaluate refcoco --data val.jsonl --checkpoint DIR       and its base model
    vlm-grpo evaluate refcoco --data val.jsonl --predictions outputs.jsonl --frame permille
    vlm-grpo evaluate super_clevr_200 --data rows.jsonl --predictions log.json --format r1_v
    vlm-grpo evaluate refcoco --data val.jsonl --server http://localhost:8000 model=Qwen/…
    vlm-grpo evaluate refcoco --data val.jsonl --server https://api.openai.com/v1 \\
        --served-model gpt-4o --price 2.5,10
    vlm-grpo evaluate counting --data test.jsonl --predictions outputs.jsonl --json
    vlm-grpo evaluate grounding --data test.jsonl --predictions rec_results_500.json \\
        --format vlm_r1 --frame resized
    accelerate launch -m vlm_grpo.cli evaluate refcoco --data val.jsonl model=…

    On a benchmark, the model and the prompt settings of a checkpoint come from its config.yaml.
    With --frame resized every prediction also has "seen": [[width, height]], the size in pixels to
    which the model resized each image.
    """
    from vlm_grpo.benchmarks.definition import benchmark_names

    values = overrides or []
    for override in values:
        if override.startswith("checkpoint="):  # an option, not a setting
            folder = override.removeprefix("checkpoint=")
            raise UserError(f"{override} is not a setting: write --checkpoint {folder}")
    if predictions is None and server is None and frame is not None:
        raise UserError("--frame needs --predictions or --server: the frame of a model is known")
    endpoint = build_endpoint(context.params, None if server is None else frame)
    if endpoint is not None and (checkpoint is not None or predictions is not None):
        raise UserError(
            "--server answers with its own weights: leave out --checkpoint and --predictions; the "
            "settings of a run are those of its config.yaml, given as the recipe"
        )
    if predictions is None and layout is not None:
        raise UserError("--format needs --predictions, whose format it is")
    if data is None:
        _refuse_benchmark(recipe)
        if predictions is not None or split is not None:
            raise UserError("--predictions and --split need rows: give --data")
    is_benchmark = recipe in benchmark_names() or Path(recipe).suffix in (".yaml", ".yml")
    is_task = predictions is not None and not is_benchmark
    if not is_task and (tags is not None or as_json or image_root is not None):
        raise UserError("--tags, --json and --image-root need a task and --predictions")
    if data is not None and task is not None:
        raise UserError("--task needs a recipe: a benchmark has its own task")
    if predictions is not None and checkpoint is not None:
        raise UserError("--predictions are scored without a model: leave out --checkpoint")
    if is_task and split is not None:
        raise UserError("--split needs a benchmark")
    if predictions is not None and data is not None:
        written_frame = None if frame is None else get_frame(frame)
        with exit_when_stopped("nothing was written"):
            if is_task:
                from vlm_grpo.config.data import DataSettings

                rows = DataSettings(train=data, image_root=image_root)
                loaded = _load_task(recipe, values, written_frame, tags)
                _score_outputs(loaded, rows, (predictions, layout), as_json)
            else:
                from vlm_grpo.eval.benchmark import score_benchmark

                settings = _benchmark_settings(recipe, data, None, [_NO_MODEL, *values])
                score_benchmark(recipe, settings, predictions, layout, written_frame, split)
        return
    folder = _find_checkpoint(checkpoint)
    if data is None:
        _evaluate_recipe(recipe, add_task_override(values, task), folder, endpoint)
        return
    values = values if endpoint is None else [_NO_MODEL, *values]
    settings = _benchmark_settings(recipe, data, folder, values)
    with exit_when_stopped("the same command continues it"):
        from vlm_grpo.eval.benchmark import evaluate_benchmark

        evaluate_benchmark(recipe, settings, folder, split, endpoint)


def _refuse_benchmark(name: str) -> None:
    """Refuse the name of a benchmark without rows, which would be sought among the recipes."""
    from vlm_grpo.benchmarks.definition import benchmark_names, load_benchmark
    from vlm_grpo.config.recipes import recipe_names

    if name in benchmark_names() and name not in recipe_names():
        converter = load_benchmark(name).converter
        raise UserError(
            f"{name} is a benchmark: convert its published files to rows with\n"
            f"  python -m vlm_grpo.data_scripts.{converter} --out {name}.jsonl …\n"
            f"and give them and a model:\n"
            f"  vlm-grpo evaluate {name} --data {name}.jsonl model=…"
        )


def _find_checkpoint(given: str | None) -> Path | None:
    if given is None:
        return None
    from vlm_grpo.model.resolve import find_checkpoint

    found = find_checkpoint(given)
    if found != Path(given):
        newest = "" if "@" in given else ", the newest of its run"
        typer.echo(f"checkpoint {found}{newest}")
    return found


def _evaluate_recipe(
    recipe: str, overrides: list[str], checkpoint: Path | None, endpoint: Endpoint | None
) -> None:
    from vlm_grpo.config.recipes import load_settings

    settings = load_settings(recipe, overrides)
    remains = "nothing was written" if endpoint is None else "the same command continues it"
    with exit_when_stopped(remains):
        from vlm_grpo.dist.launch import initialize_distributed
        from vlm_grpo.eval import evaluate

        evaluation = evaluate.evaluate(settings, checkpoint, endpoint)
        if initialize_distributed().is_main_process:
            typer.echo(f"{evaluation}\n")
            for name, value in evaluation.metrics.items():
                known = name != evaluation.primary_metric and name in evaluation.intervals
                shown = " [{:.4f}, {:.4f}]".format(*evaluation.intervals[name]) if known else ""
                typer.echo(f"  {name:<24} {value:.4f}{shown}")
            typer.echo(f"\npredictions in {evaluation.path}")


def _benchmark_settings(
    name: str, data: str, checkpoint: Path | None, overrides: list[str]
) -> Settings:
    """Build the settings for a benchmark's rows: many are those of the checkpoint's training."""
    from omegaconf import OmegaConf

    from vlm_grpo.benchmarks.definition import load_benchmark
    from vlm_grpo.config.recipes import build_settings, load_settings

    benchmark = load_benchmark(name)
    values: dict[str, Any] = {"model": "???"}
    if checkpoint is not None and (checkpoint / "config.yaml").is_file():
        trained = load_settings(str(checkpoint / "config.yaml"))
        values = trained.model_dump(mode="json", include=CHECKPOINT_SETTINGS)
        values["evaluation"] |= {"benchmark": None, "samples": 1}
        options = values["task_options"] if trained.task == benchmark.task else {}
        # Asked as it was trained, whatever the benchmark's published models were asked to write.
        values["task_options"] = {"tags": False, "thinking": False, **options}
    values |= {
        "name": f"benchmark-{Path(name).stem}",
        "task": benchmark.task,
        "data": {"train": "none", "eval": data},
    }
    return build_settings(f"benchmark {name}", OmegaConf.create(values), overrides)


def _load_task(
    name: str, options: Sequence[str], frame: CoordinateFrame | None, tags: bool | None
) -> Task:
    """Load the task that scores outputs; tags None: it reads those of outputs that have them."""
    from vlm_grpo.benchmarks.definition import build_benchmark_task
    from vlm_grpo.task.coordinates import ORIGINAL
    from vlm_grpo.task.registry import build_task, load_task_class

    values = parse_task_options(options)
    for option, flag in {"tags": "--tags or --no-tags", "frame": "--frame"}.items():
        if option in values:
            raise UserError(f"{option} is not a task option with --predictions: use {flag}")
    task_class = load_task_class(name)
    if tags is None:
        task_class = build_benchmark_task(task_class)
    return build_task(task_class, name, values | {"tags": bool(tags), "frame": frame or ORIGINAL})


def _score_outputs(
    task: Task, data: DataSettings, predictions: tuple[Path, str | None], as_json: bool
) -> None:
    from vlm_grpo.eval.evaluate import score_outputs
    from vlm_grpo.eval.scored import format_row, has_answer

    scored, unanswered = score_outputs(task, data, *predictions)
    rewards, metrics = (
        {name: _mean(scored.get_column(name)) for name in scored.rows[0][key]}
        for key in ("rewards", "metrics")
    )
    total = {
        "n": scored.n,
        "answered": sum(has_answer(row["answer"]) for row in scored.rows),
        "unscorable": scored.metrics["unscorable"],
        "reward": _mean([row["reward"] for row in scored.rows]),
        "rewards": rewards,
        "metrics": metrics,
        "corpus": {name: value for name, value in scored.corpus.items() if value == value},
    }
    if as_json:
        for row in scored.rows:
            print(format_row({key: row[key] for key in ("id", "answer", "rewards", "metrics")}))
        print(json.dumps({"total": total}, ensure_ascii=False))
    else:
        _print_table(scored, total, unanswered)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _print_table(scored: Scored, total: dict[str, Any], unanswered: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from vlm_grpo.eval.benchmark import format_unread

    means = {**total["rewards"], **total["metrics"]}
    table = Table("id", "answer", *means)
    for row in scored.rows[:_MAX_TABLE_ROWS]:
        values = {**row["rewards"], **row["metrics"]}
        answer = "no answer" if row["answer"] is None else str(row["answer"])
        table.add_row(row["id"], answer[:60], *(_format(values[name]) for name in means))
    if (more := scored.n - _MAX_TABLE_ROWS) > 0:
        table.add_row("…", f"{more} more; --json shows all")
    table.add_section()
    answered = f"{total['answered']} answered"
    table.add_row(f"all {total['n']}", answered, *map(_format, means.values()))
    lines = [f"{name} {_format(value)}" for name, value in total["corpus"].items()]
    if unanswered:
        lines.append(f"{unanswered} more examples have no output in the file")
    if (unread := format_unread(scored)) is not None:
        lines.append(f"{unread}: see --tags and --frame")
    if count := total["unscorable"]:
        lines.append(f"{count} outputs could not be scored: a reward failed or took too long")
    console = Console()
    for line in (table, *lines):
        console.print(line, markup=False)


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
