"""Saving a run's state whole or not at all, and finding the newest one."""

from __future__ import annotations

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_grpo.errors import UserError

STATE_FILE = "trainer_state.pt"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class TrainerState:
    """What a run needs besides the weights to go on where it stopped.

    Attributes:
        step: steps done.
        position: examples drawn from the stream.
        optimizer: the optimizer's state.
        scheduler: the learning-rate schedule's state.
        reference: the reference policy's snapshot, empty where there is none.
        best: best held-out value of the headline metric so far, with its step; None before any.
        random: states of the random generators.
    """

    step: int
    position: int
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    reference: dict[str, torch.Tensor]
    best: tuple[float, int] | None
    random: dict[str, Any]


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, in plain types and tensors."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the generators back into saved states."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def save_checkpoint(folder: Path, state: TrainerState, save_weights: Any) -> Path:
    """Write ``folder/step-N``: aside first, flushed to disk, then renamed in one go.

    Args:
        folder: the run's ``checkpoints``.
        state: the run's state.
        save_weights: called with the folder to write weights, processor and settings into.

    Returns:
        The checkpoint's folder.
    """
    target = folder / f"step-{state.step}"
    aside = folder / f".step-{state.step}.tmp"
    for left_over in folder.glob(".step-*"):  # of a run that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)
    aside.mkdir(parents=True)
    save_weights(aside)
    torch.save(vars(state), aside / STATE_FILE)
    for path in [*aside.rglob("*"), aside]:
        _flush(path)
    if target.exists():  # a run resumed from an earlier checkpoint comes by here again
        old = _set_aside(target)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    _flush(folder)
    return target


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that it is none any more, even if removing it is cut short."""
    old = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return checkpoint.rename(old)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All complete checkpoints of a run with their steps, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / STATE_FILE).is_file()
    ]
    return sorted(found)


def load_state(checkpoint: Path) -> TrainerState:
    """The state beside a checkpoint's weights.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        return TrainerState(**state)
    except (OSError, RuntimeError, TypeError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be resumed: {error}") from error


def prune(folder: Path, keep_last: int, keep: set[int | None]) -> None:
    """Remove all but the newest ``keep_last`` checkpoints (0: none) and those of steps ``keep``."""
    found = checkpoints(folder)
    for step, path in found[: -keep_last or len(found)] if keep_last else []:
        if step not in keep:
            shutil.rmtree(_set_aside(path))
