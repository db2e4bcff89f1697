"""Resolve the name of a model: a hub name, a folder, a run, or a checkpoint of a run."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from vlm_grpo.config.recipes import Overrides, build_settings, load_settings, recipe_names
from vlm_grpo.config.run import Settings, find_folder, list_runs
from vlm_grpo.data.held_out import get_held_out_task
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.model.loading import get_model_source
from vlm_grpo.task.registry import IN_SESSION
from vlm_grpo.utils.jsonl import read_object, read_rows

NO_TASK = "none"  # Settings.task of a model that was not trained by a run
UNKNOWN = "none"  # Settings.model of a server's model whose processor is not known here
# Version 0.1.0 also saved within a step: step-12-1.
_CHECKPOINT = re.compile(r"step-(\d+)(?:-\d+)?")


@dataclass(frozen=True)
class ResolvedModel:
    """The location of a model's weights and the settings of their training."""

    settings: Settings  # of the run, or defaults with ``task`` = ``NO_TASK``
    checkpoint: Path | None = None  # weights or an adapter; None: those of ``settings.model``
    run: Path | None = None  # its folder; None: the checkpoint is not in that of a run


def resolve_model(name: str, overrides: Overrides = (), is_served: bool = False) -> ResolvedModel:
    """Find the weights and settings of a model; ``overrides`` are as for ``load_settings``.

    ``name`` is ``embedded``, a hub name, the folder of a model, the folder of a run or its name in
    ``runs``, or the folder of a checkpoint. ``RUN@step`` is the run's checkpoint of that step,
    ``RUN@best`` the best one by the held-out primary metric, ``RUN`` and ``RUN@last`` the newest.
    ``none``, with ``is_served``, is a server's model about which nothing is known.
    """
    if is_served and name == UNKNOWN:
        return ResolvedModel(_build_default_settings(UNKNOWN, overrides))
    folder, step = find_folder(name), None
    if folder is None and "@" in name:
        name, _, wanted = name.rpartition("@")
        if not wanted.isdecimal() and wanted not in ("best", "last"):
            raise UserError(f"the step after @ is {wanted!r}; it must be a number, best or last")
        folder, step = find_folder(name), int(wanted) if wanted.isdecimal() else wanted
    if folder is not None and (folder / "checkpoints").is_dir():
        return _resolve_run(folder, overrides, step)
    if step is not None:
        raise UserError(
            f"{name} is not the folder of a run, so it has no checkpoint of step {step}"
        )
    if folder is None:
        get_model_source(name)  # refuses a missing path
        if "/" not in name and name != "embedded":
            known = ["embedded", *list_runs()]
            raise UserError(
                f"there is no model or run {name!r}{nearest(name, known)}: give a hub name "
                "such as Qwen/Qwen2.5-VL-3B-Instruct, a folder, or a run"
            )
        return ResolvedModel(_build_default_settings(name, overrides))
    model, adapter = folder / "config.json", folder / "adapter_config.json"
    if (folder / "config.yaml").is_file() and (model.is_file() or adapter.is_file()):
        run = folder.parent.parent if folder.parent.name == "checkpoints" else None
        return ResolvedModel(load_settings(str(folder / "config.yaml"), overrides), folder, run)
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        if not base:
            raise UserError(f"{adapter} does not name its base model (base_model_name_or_path)")
        return ResolvedModel(_build_default_settings(base, overrides), folder)
    if not model.is_file():
        raise UserError(f"{folder} has no model, no adapter and no checkpoints")
    return ResolvedModel(_build_default_settings(str(folder), overrides))


def resolve_recipe(name: str, overrides: Overrides = ()) -> ResolvedModel:
    """Load the settings of a recipe, or find a run or a checkpoint as ``resolve_model`` does.

    A recipe has precedence over a run of its name in ``runs``.
    """
    if name not in recipe_names() and not name.endswith((".yaml", ".py")):
        folder = find_folder(name) or find_folder(name.rpartition("@")[0] or name)
        if folder is not None and (folder / "config.yaml").is_file():
            return resolve_model(name, overrides)
    return ResolvedModel(load_settings(name, overrides))


def find_checkpoint(folder: str | Path | None) -> Path | None:
    """Return the folder of a checkpoint, which is named as for ``resolve_model``."""
    if folder is None:
        return None
    found = find_folder(folder)
    if "@" in str(folder) if found is None else (found / "checkpoints").is_dir():
        return resolve_model(str(folder)).checkpoint
    return found or Path(folder)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder with their numbers of steps, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()  # incomplete ones have other names
    matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in paths if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _build_default_settings(model: str, overrides: Overrides) -> Settings:
    values = {"name": "model", "task": NO_TASK, "model": model, "data": {"train": "none"}}
    return build_settings(f"of model {model}", OmegaConf.create(values), overrides)


def _resolve_run(run: Path, overrides: Overrides, step: int | str | None) -> ResolvedModel:
    found = dict(list_checkpoints(run / "checkpoints"))
    if not found:
        raise UserError(f"{run} has no complete checkpoint: continue the run with resume=true")
    if step in (None, "last"):
        step = max(found)
    elif step == "best":
        step = _find_best_step(run, list(found))
    if step not in found:
        known = ", ".join(map(str, found))
        raise UserError(
            f"{run} has no checkpoint of step {step}{nearest(str(step), map(str, found))}: its "
            f"checkpoints are of steps {known}"
        )
    checkpoint = found[int(step)]
    return ResolvedModel(load_settings(str(checkpoint / "config.yaml"), overrides), checkpoint, run)


def read_held_out_values(run: Path, metric: str) -> dict[int, float]:
    """Read the held-out means of a metric from ``metrics.jsonl``, by number of finished steps."""
    # The evaluation in a line came after the step in that line, which counts from 0.
    path, name = run / "metrics.jsonl", f"eval/{metric}"
    rows = read_rows(path) if path.is_file() else []
    return {row["step"] + 1: row[name] for row in rows if math.isfinite(row.get(name, math.nan))}


def _find_best_step(run: Path, steps: Sequence[int]) -> int:
    """Return the step with the best held-out primary metric, the later one of equal steps."""
    metric, lower_is_better = _get_primary_metric(run, load_settings(str(run / "config.yaml")))
    values = read_held_out_values(run, metric)
    known = [step for step in steps if step in values]
    if not known:
        raise UserError(
            f"no checkpoint of {run} was evaluated, so there is no best one: train with data.eval "
            "and evaluation.every, or give the step"
        )
    sign = -1 if lower_is_better else 1
    return max(known, key=lambda step: (sign * values[step], step))


def _get_primary_metric(run: Path, settings: Settings) -> tuple[str, bool]:
    """Return the name of the primary metric, empty if unknown, and whether it is an error."""
    if not settings.task.startswith(IN_SESSION):
        task = get_held_out_task(settings, load_run_task(settings))
        return task.primary_metric, task.lower_is_better
    # The summaries of the evaluations, which the class itself has written.
    for path in sorted((run / "evaluation").glob("step-??????*.json"), reverse=True):
        summary = read_object(path)
        return summary["headline"], summary["lower_is_better"]
    return "", False
