"""Trackers of metrics, images and completions: TensorBoard, Weights & Biases, trackio and MLflow.

They are Accelerate's trackers. A tracker that fails is reported once and dropped, because a
dashboard must not end a run.
"""

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from vlm_grpo.errors import UserError

logger = logging.getLogger(__name__)

PROJECT = "vlm-grpo"
"""Project in Weights & Biases, trackio and MLflow, unless their environment variables name one."""
TABLE_TRACKERS = ("wandb", "trackio")
"""Trackers with tables that may hold images; their classes ``Table`` and ``Image`` agree."""


def check_installed(names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"logging.trackers: {', '.join(missing)} is not installed: pip install "
            f"{' '.join(missing)}, or leave it out"
        )


class Trackers:
    """The trackers of one run; none is active before ``start``.

    The run's folder also holds TensorBoard's events: it names a run after the folder of its events.
    """

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self.names, self.run_dir = names, run_dir
        self._active: list[Any] = []  # GeneralTracker declares no name

    def start(self, config: Mapping[str, Any], resume_at: int = 0) -> None:
        """Start the trackers; TensorBoard hides entries after ``resume_at`` steps."""
        for name in self.names:
            arguments = _get_arguments(name, self.run_dir, resume_at)
            self._active.append(LOGGER_TYPE_TO_CLASS[name](**arguments))
        self._call_all(lambda tracker: tracker.start())
        self._call_all(lambda tracker: _store_config(tracker, dict(config)))

    @property
    def any(self) -> bool:
        return bool(self._active)

    @property
    def takes_tables(self) -> bool:
        return any(tracker.name in TABLE_TRACKERS for tracker in self._active)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._call_all(lambda tracker: tracker.log(values, step=step))

    def log_images(self, step: int, images: Mapping[str, Image.Image]) -> None:
        """Log images by name after ``step`` steps, where Accelerate's tracker takes images."""
        shown = {name: [image.convert("RGB")] for name, image in images.items()}
        self._call_all(lambda tracker: _log_images(tracker, shown, step))

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows, which all have the same columns, as a table where there are tables."""
        if rows:
            self._call_all(lambda tracker: _log_table(tracker, name, rows, step))

    def finish(self) -> None:
        self._call_all(lambda tracker: tracker.finish())

    def _call_all(self, action: Callable[[Any], None]) -> None:
        for tracker in list(self._active):
            try:
                action(tracker)
            except Exception as error:  # any service may raise anything; the run must continue
                self._active.remove(tracker)
                logger.warning(
                    "tracker %s failed and is dropped; the run continues, and metrics.jsonl has "
                    "all metrics: %s: %s",
                    tracker.name,
                    type(error).__name__,
                    error,
                )


def _get_arguments(name: str, run_dir: Path, resume_at: int) -> dict[str, Any]:
    if name == "tensorboard":
        purge = {"purge_step": resume_at + 1} if resume_at else {}
        return {"run_name": "", "logging_dir": run_dir, **purge}
    if name == "mlflow":
        return {"experiment_name": PROJECT, "run_name": run_dir.name}
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    place = {"dir": str(run_dir)} if name == "wandb" else {}
    return {"run_name": project, "name": run_dir.name, **place}


def _store_config(tracker: Any, config: dict[str, Any]) -> None:
    if tracker.name == "tensorboard":  # Accelerate's method adds another run, named after the time
        tracker.writer.add_hparams(config, {}, run_name=".")
    else:
        tracker.store_init_configuration(config)


def _log_images(tracker: Any, images: Mapping[str, Sequence[Image.Image]], step: int) -> None:
    if tracker.name == "tensorboard":
        pixels = {name: np.stack(list(map(np.asarray, own))) for name, own in images.items()}
        tracker.log_images(pixels, step=step, dataformats="NHWC")
    elif hasattr(tracker, "log_images"):
        tracker.log_images(images, step=step)


def _log_table(tracker: Any, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    if tracker.name in TABLE_TRACKERS:
        library = importlib.import_module(tracker.name)
        data = [
            [library.Image(v) if isinstance(v, Image.Image) else v for v in row.values()]
            for row in rows
        ]
        tracker.log({name: library.Table(columns=list(rows[0]), data=data)}, step=step)
