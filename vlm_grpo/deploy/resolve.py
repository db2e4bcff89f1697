"""A model as a user names it: a hub name, a folder, a run, or one checkpoint of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from vlm_grpo.benchmarks import held_out_task
from vlm_grpo.checkpoint.store import checkpoints
from vlm_grpo.config.run import RUNS, Overrides, Settings, build_settings, load_settings
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.registry import load_task
from vlm_grpo.utils.jsonl import read_rows

NO_TASK = "none"
"""``Settings.task`` of a model that no run of ours has trained."""


@dataclass(frozen=True)
class ModelChoice:
    """Where a model's weights are and under which settings they were trained.

    Attributes:
        settings: the run's, or the defaults with ``task`` = ``NO_TASK``.
        checkpoint: folder with weights or an adapter; None: the settings' model itself.
        run: the run's folder; None where the checkpoint lies in none.
    """

    settings: Settings
    checkpoint: Path | None = None
    run: Path | None = None


def choose_model(
    name: str, overrides: Overrides = (), step: int | str | None = None
) -> ModelChoice:
    """What ``name`` means.

    Args:
        name: ``embedded``, a hub name, a model's folder, a run's folder or its name in ``runs``,
            or a checkpoint's folder.
        overrides: as for ``load_settings``, over the settings of the run.
        step: which checkpoint of a run: its step, ``"best"`` by the held-out primary metric, or
        None
            for the newest.

    Raises:
        UserError: the run has no such checkpoint, or the name is a path where nothing is.
    """
    folder = next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)
    if folder is not None and (folder / "checkpoints").is_dir():
        return _of_run(folder, overrides, step)
    if step is not None:
        raise UserError(f"{name} is no run's folder, so it has no checkpoint of step {step}")
    if folder is None:
        _refuse_unknown(name)
        return ModelChoice(_plain(name, overrides))
    if _is_checkpoint(folder):
        run = folder.parent.parent if folder.parent.name == "checkpoints" else None
        return ModelChoice(load_settings(str(folder / "config.yaml"), overrides), folder, run)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path")
        if not base:
            raise UserError(f"{adapter} does not name its base model (base_model_name_or_path)")
        return ModelChoice(_plain(base, overrides), folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model, no adapter and no checkpoints")
    return ModelChoice(_plain(str(folder), overrides))


def _refuse_unknown(name: str) -> None:
    if name.startswith((".", "/", "~")):
        raise UserError(f"model {name}: there is no such folder")
    if "/" not in name and name != "embedded":
        runs = [path.name for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
        raise UserError(
            f"there is no model or run {name!r}{nearest(name, ['embedded', *runs])}: give a hub "
            "name such as Qwen/Qwen2.5-VL-3B-Instruct, a folder, or a run"
        )


def _is_checkpoint(folder: Path) -> bool:
    weights = ("config.json", "adapter_config.json")
    return (folder / "config.yaml").is_file() and any((folder / w).is_file() for w in weights)


def _plain(model: str, overrides: Overrides) -> Settings:
    values = {"name": "model", "task": NO_TASK, "model": model, "data": {"train": "none"}}
    return build_settings(f"of model {model}", OmegaConf.create(values), overrides)


def _of_run(run: Path, overrides: Overrides, step: int | str | None) -> ModelChoice:
    # Of two checkpoints after one step, the one in the middle of the next stands aside.
    kept = reversed(checkpoints(run / "checkpoints"))
    found = dict(sorted({moment.steps: path for moment, path in kept}.items()))
    if not found:
        raise UserError(f"{run} has no complete checkpoint: go on with the run by resume=true")
    if step is None:
        step = max(found)
    elif step == "best":
        step = _best(run, list(found))
    if step not in found:
        known = ", ".join(map(str, found))
        raise UserError(
            f"{run} has no checkpoint of step {step}{nearest(str(step), map(str, found))}: it has "
            f"those of {known}"
        )
    checkpoint = found[int(step)]
    return ModelChoice(load_settings(str(checkpoint / "config.yaml"), overrides), checkpoint, run)


def held_out_values(run: Path, metric: str) -> dict[int, float]:
    """The held-out means of a metric by the number of steps done, as ``metrics.jsonl`` has them.

    A line's ``step`` is the one that it is about; the evaluation on it came after that step.
    """
    rows, name = read_rows(run / "metrics.jsonl"), f"eval/{metric}"
    return {row["step"] + 1: row[name] for row in rows if math.isfinite(row.get(name, math.nan))}


def _best(run: Path, steps: Sequence[int]) -> int:
    """The step among those of the checkpoints with the best held-out primary metric, the
    later of two."""
    settings = load_settings(str(run / "config.yaml"))
    task = held_out_task(settings, load_task(settings.task, **settings.task_options))
    values = held_out_values(run, task.primary_metric)
    known = [step for step in steps if step in values]
    if not known:
        raise UserError(
            f"no checkpoint of {run} was evaluated, so none is the best: train with data.eval and "
            "evaluation.every, or give the step"
        )
    sign = -1 if task.lower_is_better else 1
    return max(known, key=lambda step: (sign * values[step], step))
