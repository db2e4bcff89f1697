"""``vlm-grpo evaluate``: score a model on held-out examples or on a public benchmark."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlm_grpo.cli.common import (
    Concurrency,
    FrameName,
    Overrides,
    ServedModelName,
    ServerUrl,
    Timeout,
    build_endpoint,
    exit_when_stopped,
    find_checkpoint,
    get_frame,
    parse_task_options,
)
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.data import DataSettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.eval.scored import Scored
    from vlm_grpo.serve.chat_client import Endpoint
    from vlm_grpo.task import Task

_NO_MODEL = "model=none"  # for evaluations for which no model must be named
# What the evaluation of a checkpoint on a benchmark takes from its training.
CHECKPOINT_SETTINGS = {"model", "model_revision", "task_options", "policy", "rollout", "evaluation"}

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
            help="A recipe or a run; with --data a benchmark; with --predictions also a task.",
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    data: Annotated[
        str | None,
        typer.Option(help="Rows of the benchmark, as its converter wrote them, or of the task."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="Outputs to score instead of running a model: JSON Lines of id and output, or "
            "the samples that lmms-eval logs."
        ),
    ] = None,
    frame: FrameName = None,
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --server: also evaluate the weights here.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With a task: print one JSON object per row.")
    ] = False,
) -> None:
    """Score a model on held-out examples, with n and a 95 % interval.

    With --data the score is the official metric of a public benchmark (docs/benchmarks.md lists
    them), and a checkpoint is compared with its base model, example by example. An interrupted
    evaluation resumes from its saved outputs. With a task and --predictions, the outputs of any
    model are scored by the task's rewards and metrics.

    \b
    vlm-grpo evaluate counting                                        the recipe's model
    vlm-grpo evaluate runs/counting                                   a run's newest checkpoint
    vlm-grpo evaluate counting@best data.eval=test.jsonl              its best one
    vlm-grpo evaluate counting --checkpoint DIR                       a checkpoint
    vlm-grpo evaluate refcoco --data val.jsonl model=Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo evaluate refcoco --data val.jsonl --checkpoint DIR       and its base model
    vlm-grpo evaluate refcoco --data val.jsonl --predictions outputs.jsonl --frame permille
    vlm-grpo evaluate refcoco --data val.jsonl --server http://localhost:8000 model=Qwen/…
    vlm-grpo evaluate refcoco --data val.jsonl --server https://api.openai.com/v1 \\
        --served-model gpt-4o
    vlm-grpo evaluate runs/counting --server http://localhost:8000 --compare
    vlm-grpo evaluate counting --data test.jsonl --predictions outputs.jsonl --json
    vlm-grpo evaluate grounding --data test.jsonl --predictions outputs.jsonl --frame resized
    accelerate launch -m vlm_grpo.cli evaluate refcoco --data val.jsonl model=…

    On a benchmark, the model and the prompt settings of a checkpoint come from its config.yaml.
    With --compare, the outputs of the server that differ from those of the weights are printed.
    With --frame resized every prediction also has "seen": [[width, height]], the size in pixels to
    which the model resized each image.
    """
    from vlm_grpo.benchmarks.definition import benchmark_names

    values = overrides or []
    if data is None:
        _refuse_benchmark(recipe)
    scores, asks = predictions is not None, server is not None
    endpoint = build_endpoint(context.params, frame if asks else None)
    is_benchmark = recipe in benchmark_names() or Path(recipe).suffix in (".yaml", ".yml")
    is_task = scores and not is_benchmark
    for is_wrong, message in (
        (
            frame is not None and not (scores or asks),
            "--frame needs --predictions or --server: the frame of a model is known",
        ),
        (
            asks and (scores or (checkpoint is not None and not compare)),
            "--server answers with its own weights: leave out --checkpoint and --predictions; the "
            "settings of a run are those of its config.yaml, given as the recipe",
        ),
        (compare and not asks, "--compare needs --server: the weights are evaluated here anyway"),
        (scores and data is None, "--predictions needs rows: give --data"),
        (as_json and not is_task, "--json needs a task and --predictions"),
        (
            scores and checkpoint is not None,
            "--predictions are scored without a model: leave out --checkpoint",
        ),
    ):
        if is_wrong:
            raise UserError(message)
    remains = "the same command continues it" if asks or data else "nothing was written"
    with exit_when_stopped("nothing was written" if scores else remains):
        if data is None:
            _evaluate_recipe(recipe, values, checkpoint, endpoint, compare)
        elif predictions is None:
            folder = find_checkpoint(checkpoint)
            given = values if endpoint is None or compare else [_NO_MODEL, *values]
            settings = _benchmark_settings(recipe, data, folder, given)
            from vlm_grpo.eval.benchmark import evaluate_benchmark
            from vlm_grpo.eval.remote import describe_differences

            if not compare:
                evaluate_benchmark(recipe, settings, folder, endpoint)
                return
            _check_comparable(settings)
            own = settings.model_copy(update={"name": f"{settings.name}-server"})
            served = evaluate_benchmark(recipe, own, None, endpoint)[-1].scored
            local = evaluate_benchmark(recipe, settings, folder)[-1].scored
            typer.echo(f"\n{describe_differences(local, served)}")
        elif is_task:
            from vlm_grpo.config.data import DataSettings

            options = parse_task_options(values)
            rows = DataSettings(train=data, **options.pop("data", {}))
            loaded = _load_task(recipe, options, frame)
            _score_outputs(loaded, rows, predictions, as_json)
        else:
            from vlm_grpo.eval.benchmark import score_benchmark

            settings = _benchmark_settings(recipe, data, None, [_NO_MODEL, *values])
            written_frame = None if frame is None else get_frame(frame)
            score_benchmark(recipe, settings, predictions, written_frame)


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


def _evaluate_recipe(
    recipe: str,
    overrides: list[str],
    checkpoint: str | None,
    endpoint: Endpoint | None,
    compare: bool,
) -> None:
    from vlm_grpo.dist.launch import initialize_distributed
    from vlm_grpo.eval import evaluate
    from vlm_grpo.eval.remote import describe_differences
    from vlm_grpo.model.resolve import resolve_recipe

    found = resolve_recipe(recipe, overrides)
    if checkpoint is None and found.checkpoint and (compare or endpoint is None):
        checkpoint = recipe
    weights = find_checkpoint(checkpoint)
    if compare:
        _check_comparable(found.settings)
    tables = []
    for server in (endpoint, None) if compare else (endpoint,):
        tables.append(evaluate.evaluate(found.settings, None if server else weights, server))
        if initialize_distributed().is_main_process:
            _print_metrics(tables[-1])
            typer.echo(f"\npredictions in {tables[-1].path}")
    if compare:
        typer.echo(f"\n{describe_differences(tables[1], tables[0])}")


def _check_comparable(settings: Settings) -> None:
    if settings.model == "none" or settings.evaluation.temperature:
        raise UserError(
            "--compare needs model=…, the weights that the server has, and "
            "evaluation.temperature=0: a server draws other random numbers"
        )


def _print_metrics(scored: Scored) -> None:
    typer.echo("\n  ".join(scored.lines) + "\n")
    for name, value in scored.metrics.items():
        known = name != scored.primary_metric and name in scored.intervals
        shown = " [{:.4f}, {:.4f}]".format(*scored.intervals[name]) if known else ""
        typer.echo(f"  {name:<24} {value:.4f}{shown}")


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


def _load_task(name: str, values: dict[str, Any], frame: str | None) -> Task:
    """Load the task that scores outputs; without ``tags``, it reads those of outputs with tags."""
    from vlm_grpo.benchmarks.definition import build_benchmark_task
    from vlm_grpo.task.coordinates import ORIGINAL
    from vlm_grpo.task.registry import build_task, load_task_class

    if "frame" in values:
        raise UserError("frame is not a task option with --predictions: use --frame")
    task_class = load_task_class(name)
    if "tags" not in values:
        task_class = build_benchmark_task(task_class)
    own_frame = ORIGINAL if frame is None else get_frame(frame)
    return build_task(task_class, name, {"tags": False, **values, "frame": own_frame})


def _score_outputs(task: Task, data: DataSettings, path: Path, as_json: bool) -> None:
    from vlm_grpo.eval.benchmark import format_unread
    from vlm_grpo.eval.evaluate import score_outputs
    from vlm_grpo.utils.jsonl import format_row

    scored, unanswered = score_outputs(task, data, path)
    if as_json:
        for row in scored.rows:
            typer.echo(format_row({key: value for key, value in row.items() if key != "output"}))
        metrics = {name: value for name, value in scored.metrics.items() if math.isfinite(value)}
        typer.echo(json.dumps({"total": {"n": scored.n, "metrics": metrics}}, ensure_ascii=False))
        return
    _print_metrics(scored)
    if unanswered:
        typer.echo(f"{unanswered} more examples have no output in the file")
    if (unread := format_unread(scored)) is not None:
        typer.echo(f"{unread}: see tags=true, tags=false and --frame")
    if count := scored.metrics["unscorable"]:
        typer.echo(f"{count} outputs could not be scored: a reward failed or took too long")
