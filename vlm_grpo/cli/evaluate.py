"""``vlm-grpo evaluate``: score a model on held-out examples or on a public benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlm_grpo.cli.common import (
    Overrides,
    RecipeTask,
    add_task_override,
    exit_when_stopped,
    get_frame,
)
from vlm_grpo.coordinates import FRAMES
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.run import Settings

CHECKPOINT_SETTINGS = {
    "model",
    "model_revision",
    "task_options",
    "policy",
    "rollout",
    "evaluation",
}
"""Settings that the evaluation of a checkpoint on a benchmark takes from its training."""


RecipeOrBenchmark = Annotated[
    str, typer.Argument(metavar="RECIPE|BENCHMARK", help="A recipe, or with --data a benchmark.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the checkpoint to evaluate.")
]
BenchmarkRows = Annotated[
    str | None, typer.Option(help="Rows of the benchmark, as its converter wrote them.")
]
Predictions = Annotated[
    Path | None, typer.Option(help="Outputs to score instead of running a model.")
]
Frame = Annotated[
    str | None,
    typer.Option(help=f"Coordinate frame of boxes in --predictions: {', '.join(FRAMES)}."),
]
Split = Annotated[
    str | None, typer.Option(help="Split whose published results to print for comparison.")
]


def evaluate(
    recipe: RecipeOrBenchmark,
    overrides: Overrides = None,
    task: RecipeTask = None,
    checkpoint: Checkpoint = None,
    data: BenchmarkRows = None,
    predictions: Predictions = None,
    frame: Frame = None,
    split: Split = None,
) -> None:
    """Score a model on held-out examples, with n and a 95 % interval.

    With --data the score is the official metric of a public benchmark (docs/benchmarks.md lists
    them), and a checkpoint is compared with its base model, example by example. An interrupted
    evaluation resumes from its saved outputs.

    \b
    vlm-grpo evaluate counting                                        the recipe's model
    vlm-grpo evaluate counting --checkpoint runs/counting/checkpoints/step-300
    vlm-grpo evaluate runs/counting/config.yaml --checkpoint DIR data.eval=test.jsonl
    vlm-grpo evaluate refcoco --data val.jsonl --split val model=Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo evaluate refcoco --data val.jsonl --checkpoint DIR       and its base model
    vlm-grpo evaluate refcoco --data val.jsonl --predictions outputs.jsonl --frame permille
    accelerate launch -m vlm_grpo.cli evaluate refcoco --data val.jsonl model=…

    On a benchmark, the model and the prompt settings of a checkpoint come from its config.yaml.
    """
    values = overrides or []
    _refuse_checkpoint_override(values)
    if predictions is None and frame is not None:
        raise UserError("--frame needs --predictions: the frame of a model is known")
    if data is None:
        if predictions is not None or split is not None:
            raise UserError("--predictions and --split need a benchmark and its rows: give --data")
        _evaluate_recipe(recipe, add_task_override(values, task), checkpoint)
        return
    if task is not None:
        raise UserError("--task needs a recipe: a benchmark has its own task")
    if predictions is None:
        _evaluate_benchmark(recipe, data, checkpoint, values, split)
        return
    if checkpoint is not None:
        raise UserError("--predictions are scored without a model: leave out --checkpoint")
    settings = _benchmark_settings(recipe, data, None, ["model=none", *values])
    _score_benchmark(recipe, settings, predictions, frame, split)


def _refuse_checkpoint_override(overrides: Sequence[str]) -> None:
    """Refuse ``checkpoint=DIR``, which is an option and not a setting."""
    for override in overrides:
        if override.startswith("checkpoint="):
            folder = override.removeprefix("checkpoint=")
            raise UserError(f"{override} is not a setting: write --checkpoint {folder}")


def _evaluate_recipe(recipe: str, overrides: list[str], checkpoint: Path | None) -> None:
    from vlm_grpo.config.recipes import load_settings

    settings = load_settings(recipe, overrides)
    with exit_when_stopped():
        from vlm_grpo.distributed.launch import initialize_distributed
        from vlm_grpo.evaluation import evaluate

        evaluation = evaluate.evaluate(settings, checkpoint)
        if initialize_distributed().is_main_process:
            typer.echo(f"{evaluation}\n")
            for name, value in evaluation.metrics.items():
                typer.echo(f"  {name:<24} {value:.4f}")
            typer.echo(f"\npredictions in {evaluation.path}")


def _evaluate_benchmark(
    name: str, data: str, checkpoint: Path | None, overrides: list[str], split: str | None
) -> None:
    settings = _benchmark_settings(name, data, checkpoint, overrides)
    with exit_when_stopped():
        from vlm_grpo.evaluation import evaluate

        evaluate.evaluate_benchmark(name, settings, checkpoint, split)


def _score_benchmark(
    name: str, settings: Settings, predictions: Path, frame: str | None, split: str | None
) -> None:
    written_frame = None if frame is None else get_frame(frame)
    with exit_when_stopped():
        from vlm_grpo.evaluation import evaluate

        evaluate.score_benchmark(name, settings, predictions, written_frame, split)


def _benchmark_settings(
    name: str, data: str, checkpoint: Path | None, overrides: list[str]
) -> Settings:
    """Build the settings for a benchmark's rows.

    The model, the prompt and the generation limits come from the checkpoint's ``config.yaml``;
    without a checkpoint the model must be given.
    """
    from omegaconf import OmegaConf

    from vlm_grpo.benchmarks import load_benchmark
    from vlm_grpo.config.recipes import build_settings, load_settings

    benchmark = load_benchmark(name)
    values: dict[str, Any] = {"model": "???"}
    if checkpoint is not None and (checkpoint / "config.yaml").is_file():
        trained = load_settings(str(checkpoint / "config.yaml"))
        values = trained.model_dump(mode="json", include=CHECKPOINT_SETTINGS)
        values["evaluation"]["benchmark"] = None
        if trained.task != benchmark.task:
            values["task_options"] = {}
    values |= {
        "name": f"benchmark-{Path(name).stem}",
        "task": benchmark.task,
        "data": {"train": data, "eval": data},
    }
    return build_settings(f"benchmark {name}", OmegaConf.create(values), overrides)
