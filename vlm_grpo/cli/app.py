"""The commands. Everything that takes long is imported by the command that needs it."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from vlm_grpo.benchmarks import load_benchmark
from vlm_grpo.cli import data as data_command
from vlm_grpo.cli.export import export
from vlm_grpo.cli.foreign import LAYOUTS
from vlm_grpo.cli.new_task import new_task
from vlm_grpo.cli.plan import plan
from vlm_grpo.cli.predict import predict
from vlm_grpo.cli.report import report
from vlm_grpo.cli.scoring import PREDICTIONS, print_json, print_table, score_predictions
from vlm_grpo.cli.validation import validate_task
from vlm_grpo.config.run import (
    DataSettings,
    Settings,
    build_settings,
    load_settings,
    recipe_names,
)
from vlm_grpo.coordinates import FRAMES, CoordinateFrame
from vlm_grpo.errors import Stopped, UserError, nearest
from vlm_grpo.registry import load_task, load_task_class, task_names

app = typer.Typer(
    help="""Fine-tune vision-language models with GRPO on tasks whose answers a rule can check.

    \b
    vlm-grpo train quickstart                      a first run, on any machine, in minutes
    vlm-grpo tasks                                 what can be trained
    vlm-grpo validate my_task.py --data d.jsonl    prove a task and its data, without a model

    A command's --help has its examples. --debug, anywhere, shows the traceback of an error.
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings over those of the recipe."),
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a recipe, or path to a .yaml recipe or a .py task."
    ),
]
TaskFile = Annotated[
    str | None,
    typer.Option("--task", help="Another task than the recipe's: its name or .py file."),
]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task's name or .py file.")]
Options = Annotated[
    list[str] | None,
    typer.Argument(metavar="OPTION=VALUE", help="Options of the task, as tags=true."),
]
ImageRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of the images; without it the folder of the data file."),
]

_OF_A_CHECKPOINT = {"model", "model_revision", "task_options", "policy", "rollout", "evaluation"}
"""Settings of its training under which a checkpoint is evaluated elsewhere."""

app.add_typer(data_command.app, name="data")
app.command()(report)
app.command()(new_task)
app.command()(predict)
app.command()(export)
app.command()(plan)


@app.callback(invoke_without_command=True)
def _program(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"vlm-grpo {version('vlm-grpo')}")
        raise typer.Exit


@app.command()
def train(recipe: Recipe, overrides: Overrides = None, task: TaskFile = None) -> None:
    """Train a model, and evaluate it before and after.

    \b
    vlm-grpo train quickstart
    vlm-grpo train grounding optim.lr=1e-4 rollout.num_generations=16
    vlm-grpo train counting policy.lora.r=16          adapters in place of full weights
    vlm-grpo train counting name=mine resume=true     go on where a run stopped
    vlm-grpo train counting_qwen2_vl_2b data.train=train.jsonl data.eval=test.jsonl
    vlm-grpo train recipe.yaml --task my_task.py
    accelerate launch -m vlm_grpo.cli train recipe.yaml

    The run's folder, runs/NAME, holds config.yaml, metrics.jsonl, samples/ and checkpoints/.
    """
    settings = load_settings(recipe, _with_task(overrides, task))
    _run("vlm_grpo.trainer", "train", settings)


@app.command()
def evaluate(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|BENCHMARK", help="A recipe, or with --data a benchmark."),
    ],
    overrides: Overrides = None,
    task: TaskFile = None,
    data: Annotated[
        str | None, typer.Option(help="A benchmark's rows, as its converter wrote them.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Score these outputs instead of asking a model.")
    ] = None,
    frame: Annotated[
        str | None,
        typer.Option(help=f"How boxes in --predictions are written: {', '.join(FRAMES)}."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Whose published numbers to print beside ours.")
    ] = None,
) -> None:
    """Score a model on held-out examples, with n and a 95 % interval.

    With --data the score is a public benchmark's own (docs/benchmarks.md lists them); a checkpoint
    is compared with its base model, example by example. A stopped evaluation goes on.

    \b
    vlm-grpo evaluate counting                                        the recipe's own model
    vlm-grpo evaluate counting checkpoint=runs/counting/checkpoints/step-300
    vlm-grpo evaluate runs/counting/config.yaml checkpoint=DIR data.eval=test.jsonl
    vlm-grpo evaluate refcoco --data val.jsonl --split val model=Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo evaluate refcoco --data val.jsonl checkpoint=DIR         and its base model
    vlm-grpo evaluate refcoco --data val.jsonl --predictions outputs.jsonl --frame permille
    accelerate launch -m vlm_grpo.cli evaluate refcoco --data val.jsonl model=…

    A checkpoint's own config.yaml says which model it is of, and how it was asked.
    """
    given = overrides or []
    checkpoints = [o.removeprefix("checkpoint=") for o in given if o.startswith("checkpoint=")]
    checkpoint = Path(checkpoints[-1]) if checkpoints else None
    kept = [o for o in given if not o.startswith("checkpoint=")]
    if predictions is None and frame is not None:
        raise UserError("--frame goes with --predictions: a model's own frame is known")
    if data is None:
        if predictions is not None or split is not None:
            raise UserError(
                "--predictions and --split go with a benchmark and its rows: give --data"
            )
        settings = load_settings(recipe, _with_task(kept, task))
        found = _run("vlm_grpo.evaluation.evaluate", "evaluate", settings, checkpoint)
        if importlib.import_module("vlm_grpo.distributed.launch").join().is_main_process:
            typer.echo(f"{found}\n")
            for name, value in found.metrics.items():
                typer.echo(f"  {name:<24} {value:.4f}")
            typer.echo(f"\npredictions in {found.path}")
        return
    if task is not None:
        raise UserError("--task goes with a recipe: a benchmark has its own task")
    if predictions is None:
        settings = _benchmark_settings(recipe, data, checkpoint, kept)
        _run(
            "vlm_grpo.evaluation.evaluate",
            "evaluate_benchmark",
            recipe,
            settings,
            checkpoint,
            split,
        )
        return
    if checkpoint is not None:
        raise UserError("--predictions are of no model: leave out checkpoint=")
    settings = _benchmark_settings(recipe, data, None, ["model=none", *kept])
    written = None if frame is None else _frame(frame)
    _run(
        "vlm_grpo.evaluation.evaluate",
        "score_benchmark",
        recipe,
        settings,
        predictions,
        written,
        split,
    )


@app.command()
def validate(
    task: TaskName,
    options: Options = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples to prove it on: .jsonl, .parquet, hf:NAME[:SPLIT[:CONFIG]] or "
            "embedded:NAME; without it the embedded data of the task's name."
        ),
    ] = None,
    image_root: ImageRoot = None,
) -> None:
    """Prove a task and its data without a model.

    Every row must be well-formed and every image decode; every gold answer must earn the full
    reward, an empty text 0, and known ways of gaming a reward no more than their bound.

    \b
    vlm-grpo validate counting
    vlm-grpo validate my_task.py tags=true --data train.jsonl
    """
    loaded = load_task(task, **_options(options))
    source = data or f"embedded:{task}"
    if data is None and task not in ("counting", "grounding", "ocr"):
        raise UserError(f"there is no embedded data for task {task}: give it by --data")
    settings = DataSettings(train=source, image_root=image_root)
    for line in validate_task(loaded, source, settings):
        typer.echo(line)


@app.command()
def score(
    task: TaskName,
    data: Annotated[str, typer.Option(help="The examples, as for validate.")],
    predictions: Annotated[
        Path, typer.Option(help='JSON Lines of {"id": …, "output": …}, one for each example.')
    ],
    options: Options = None,
    layout: Annotated[
        str,
        typer.Option(
            "--format",
            help="What wrote the predictions: "
            f"{PREDICTIONS} (as above), or the evaluation of {', '.join(LAYOUTS)}.",
        ),
    ] = PREDICTIONS,
    frame: Annotated[
        str, typer.Option(help=f"How the outputs' boxes are written: {', '.join(FRAMES)}.")
    ] = "original",
    tags: Annotated[
        bool, typer.Option(help="Read answers from <answer> tags, or from the whole output.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
    image_root: ImageRoot = None,
) -> None:
    """Score what any model wrote, offline.

    \b
    vlm-grpo score counting --data test.jsonl --predictions out.jsonl
    vlm-grpo score grounding --data test.jsonl --predictions out.jsonl --frame permille --no-tags
    vlm-grpo score ocr --data test.jsonl --predictions out.jsonl --json > scores.jsonl

    With --frame resized every prediction also has "seen": [[width, height]], the size in pixels
    of each image as the model saw it.

    \b
    vlm-grpo score grounding --data test.jsonl --predictions rec_results_500.json --format vlm_r1 \\
        --frame resized
    """
    if layout not in (known := [PREDICTIONS, *LAYOUTS]):
        raise UserError(
            f"there is no format {layout!r}{nearest(layout, known)}: give one of {', '.join(known)}"
        )
    given = _options(options)
    for name, flag in {"tags": "--tags or --no-tags", "frame": "--frame"}.items():
        if name in given:
            raise UserError(f"{name} is no option of score's task: give it by {flag}")
    loaded = load_task(task, **given, tags=tags, frame=_frame(frame))
    settings = DataSettings(train=data, image_root=image_root)
    scored = score_predictions(loaded, data, predictions, settings, layout)
    (print_json if as_json else print_table)(scored)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub name or embedded.")],
    image: Annotated[Path | None, typer.Option(help="Image to ask about; else noise.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Check a model: compare the shared prompt pass with the plain form on that very model.

    Prints the family, its coordinate frame, the prompt's tokens, how far the two forms' log-probs
    and gradients differ, how fast each is, and which one training will use.

    \b
    vlm-grpo doctor embedded
    vlm-grpo doctor Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg --dtype bfloat16
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype!r}; it is float32 or bfloat16")
    for line in importlib.import_module("vlm_grpo.deploy.doctor").diagnose(model, image, dtype):
        typer.echo(line)


@app.command()
def tasks() -> None:
    """List the tasks and the recipes that are installed."""
    typer.echo("Tasks (a .py file of yours is one too):")
    for name in task_names():
        try:
            about = (load_task_class(name).__doc__ or "").strip().partition("\n")[0]
        except UserError as error:  # one broken plugin must not hide the others
            about = f"cannot be loaded: {error}"
        typer.echo(f"  {name:<12} {about}")
    typer.echo("\nRecipes, for vlm-grpo train:")
    for name in recipe_names():
        typer.echo(f"  {name}")


class _CurrentStderr(logging.StreamHandler):
    """Writes to what stderr is now: a live display shows what it gets above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: exit status 0, 2 for what the user can mend, 130 when interrupted.

    Args:
        arguments: those of the command line; None: the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    handlers = [_CurrentStderr()]
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=handlers
    )
    try:
        app(args=[word for word in given if word != "--debug"], prog_name="vlm-grpo")
    except (UserError, ValidationError) as error:
        if "--debug" in given:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _run(module: str, function: str, *arguments: Any) -> Any:
    """Call a function of a module that takes seconds to import."""
    try:
        return getattr(importlib.import_module(module), function)(*arguments)
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.status) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; finished checkpoints are kept (resume=true)", err=True)
        raise typer.Exit(130) from None


def _benchmark_settings(
    name: str, data: str, checkpoint: Path | None, overrides: list[str]
) -> Settings:
    """Settings for asking a benchmark's rows.

    A checkpoint's own settings say which model it is of and how it was asked; without one the
    model must be named.
    """
    benchmark = load_benchmark(name)
    values: dict[str, Any] = {"model": "???"}
    if checkpoint is not None and (checkpoint / "config.yaml").is_file():
        trained = load_settings(str(checkpoint / "config.yaml"))
        values = trained.model_dump(mode="json", include=_OF_A_CHECKPOINT)
        values["evaluation"]["benchmark"] = None
        if trained.task != benchmark.task:
            values["task_options"] = {}
    values |= {
        "name": f"benchmark-{Path(name).stem}",
        "task": benchmark.task,
        "data": {"train": data, "eval": data},
    }
    return build_settings(f"benchmark {name}", OmegaConf.create(values), overrides)


def _frame(name: str) -> CoordinateFrame:
    if name not in FRAMES:
        raise UserError(
            f"there is no frame {name!r}{nearest(name, FRAMES)}: give one of {', '.join(FRAMES)}"
        )
    return FRAMES[name]


def _with_task(overrides: list[str] | None, task: str | None) -> list[str]:
    return [*(overrides or []), *([f"task={task}"] if task else [])]


def _options(given: list[str] | None) -> dict[str, Any]:
    """``tags=true weights.exact=2`` as a task's options."""
    for option in given or []:
        if "=" not in option:
            raise UserError(f"{option!r} is no option of a task: write name=value, as tags=true")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(given or [])))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"the task's options cannot be read: {error}") from error
    return values
