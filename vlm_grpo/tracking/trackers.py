"""Services that get a run's metrics and pictures: TensorBoard, Weights & Biases, trackio, MLflow.

They are Accelerate's trackers, each on its own: one that cannot be started or fails later is
reported once and left out from there on, for a dashboard must not end a run.
"""

from __future__ import annotations

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
"""Of Weights & Biases, trackio and MLflow, unless their own environment variable names another."""


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose library is missing.

    Raises:
        UserError: with the command that installs them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"logging.trackers: {', '.join(missing)} is not installed: pip install "
            f"{' '.join(missing)}, or leave it out"
        )


class Trackers:
    """The trackers of one run.

    Args:
        names: as in ``logging.trackers``.
        run_dir: the run's folder; TensorBoard's events go to ``tensorboard`` in it.
        config: the run's settings, shown beside its curves.
        resume_at: steps done before; TensorBoard hides what an earlier try logged after them.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any], resume_at: int = 0
    ) -> None:
        self._live: list[Any] = []  # of GeneralTracker, which declares no name
        for name in names:
            tracker = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, run_dir, resume_at))
            self._live.append(tracker)
        self._each(lambda tracker: tracker.start())
        self._each(lambda tracker: tracker.store_init_configuration(dict(config)))

    @property
    def any(self) -> bool:
        """Whether anybody still listens."""
        return bool(self._live)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers after ``step`` steps; those that are not finite are left out."""
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.log(values, step=step))

    def log_images(self, step: int, images: Mapping[str, Image.Image]) -> None:
        """Pictures by name, to be shown among the run's curves after ``step`` steps."""

        def show(tracker: Any) -> None:
            for name, image in images.items():
                _SHOW[tracker.name](tracker, name, image.convert("RGB"), step)

        self._each(show)

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish())

    def _each(self, action: Callable[[Any], None]) -> None:
        for tracker in list(self._live):
            try:
                action(tracker)
            except Exception as error:  # any service may raise anything; the run must go on
                self._live.remove(tracker)
                logger.warning(
                    "tracker %s failed and gets nothing more; the run goes on, and metrics.jsonl "
                    "has everything: %s: %s",
                    tracker.name,
                    type(error).__name__,
                    error,
                )


def _arguments(name: str, run_dir: Path, resume_at: int) -> dict[str, Any]:
    """What Accelerate's tracker of that name is made with."""
    if name == "tensorboard":
        purge = {"purge_step": resume_at + 1} if resume_at else {}
        return {"run_name": "tensorboard", "logging_dir": run_dir, **purge}
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        return {"run_name": project, "name": run_dir.name, "dir": str(run_dir)}
    if name == "trackio":
        return {"run_name": os.environ.get("TRACKIO_PROJECT", PROJECT), "name": run_dir.name}
    return {"experiment_name": PROJECT, "run_name": run_dir.name}


def _show_tensorboard(tracker: Any, name: str, image: Image.Image, step: int) -> None:
    tracker.log_images({name: np.asarray(image)[None]}, step=step, dataformats="NHWC")


def _show_wandb(tracker: Any, name: str, image: Image.Image, step: int) -> None:
    tracker.log_images({name: [image]}, step=step)


def _show_trackio(tracker: Any, name: str, image: Image.Image, step: int) -> None:
    tracker.log({name: importlib.import_module("trackio").Image(image)}, step=step)


def _show_mlflow(tracker: Any, name: str, image: Image.Image, step: int) -> None:
    importlib.import_module("mlflow").log_image(image, key=name, step=step)


_SHOW: Mapping[str, Callable[[Any, str, Image.Image, int], None]] = {
    "tensorboard": _show_tensorboard,
    "wandb": _show_wandb,
    "trackio": _show_trackio,
    "mlflow": _show_mlflow,
}
