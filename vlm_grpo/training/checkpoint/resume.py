"""Choosing the checkpoint to resume from, and checking that the run fits it."""

import hashlib
import json
import logging
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.data import is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import GONE, OnResume, find_on_resume, flatten, known_keys
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.task import Task
from vlm_grpo.training.checkpoint.checksums import CorruptCheckpoint, verify_checkpoint
from vlm_grpo.training.checkpoint.files import read_metadata, read_tensors
from vlm_grpo.types import TARGET_COLUMN, Example, VideoRef

logger = logging.getLogger(__name__)

_KEYS = frozenset(known_keys(Settings))
_COMPARED_OF_SOURCE = {"task", "task_options", "tasks", "weight"}
LIBRARIES = ("vlm-grpo", "torch", "transformers", "peft", "accelerate")


def find_checkpoint(
    settings: Settings, accelerator: Accelerator, examples: Sequence[Example], task: Task
) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. The main process selects it.

    ``UserError``, on all ranks: the folder holds a run and ``resume`` is False, all of its
    checkpoints are corrupt, or settings or examples differ from the checkpoint's."""
    found: list[Path | None] = []
    with fail_together(accelerator):
        if accelerator.is_main_process:
            folder = settings.run_dir / "checkpoints"
            existing = list_checkpoints(folder)
            if existing and not settings.resume:
                raise UserError(
                    f"{settings.run_dir} holds a run with checkpoints up to step "
                    f"{existing[-1][0]}: continue it with resume=true, or start a new run with "
                    "another name=…"
                )
            found = [find_newest_checkpoint(folder) if settings.resume else None]
    checkpoint = gather_object(found)[0]
    if checkpoint is not None:
        metadata, name = read_metadata(checkpoint), checkpoint.name
        saved, digests = metadata["settings"], read_tensors(checkpoint, "examples")["train"]
        check_same_settings(saved, settings, name, task)
        check_same_data(digests, saved["data.train"], examples, settings, name)
        warn_about_versions(metadata["versions"], get_versions())
    return checkpoint


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint; None if there are no checkpoints.

    Newer checkpoints, which are corrupt, are renamed ``damaged-step-N`` with a warning.
    ``UserError``: all are corrupt."""
    problems = []
    for _, path in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except CorruptCheckpoint as error:
            problems.append((path, error))
            continue
        for corrupt, error in problems:
            target = corrupt.with_name(f"damaged-{corrupt.name}")
            shutil.rmtree(target, ignore_errors=True)
            corrupt.rename(target)
            logger.warning(
                "%s: the checkpoint is renamed %s, and the run resumes from %s, the previous one",
                error, target.name, path.name,
            )  # fmt: skip
        return path
    if problems:
        raise UserError(
            f"{problems[0][1]}; no other checkpoint in {folder} is intact: restore one from a "
            "backup, or start a new run with another name=…"
        )
    return None


def get_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that can affect a run's results."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def flatten_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings by dotted key, as values that JSON can hold.

    ``data.train`` may change as long as the rows stay the same, so the tasks and weights of a
    mixture's sources have keys of their own.
    """
    flat = flatten(settings.model_dump(mode="json"))
    if is_mixture(settings.data.train):
        for source in settings.data.train:
            own = source.model_dump(mode="json", include=_COMPARED_OF_SOURCE)
            flat |= {f"{key} of the source {source.label}": value for key, value in own.items()}
    return flat


def check_same_settings(
    saved: Mapping[str, Any], settings: Settings, checkpoint: str, task: Task
) -> None:
    """Check that the settings of a run fit the checkpoint that it resumes from.

    ``saved`` has ``flatten_settings`` of the run that wrote it.
    """
    changes = list_changes(saved, settings).items()
    if problems := [text for key, text in changes if not _may_change(key, task)]:
        raise UserError(
            f"{checkpoint} was written with other settings:\n{bullets(problems)}\n"
            "restore them to resume from it, or start a new run with another name=…"
        )


def list_changes(saved: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Return a text for each setting that differs from ``flatten_settings`` of a saved run."""
    now, changes = flatten_settings(settings), {}
    for key in dict.fromkeys([*saved, *now]):
        before, after = saved.get(key), now.get(key)
        if before != after and key != GONE and not _is_new_setting(key, saved):
            old, new = (json.dumps(v, ensure_ascii=False, default=str) for v in (before, after))
            changes[key] = f"{key} was {old} and is now {new}"
    return changes


def _is_new_setting(key: str, saved: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was written by a version without this setting."""
    blocks = [key[:end] for end, letter in enumerate(key) if letter == "."]
    return key not in saved and key in _KEYS and not any(block in saved for block in blocks)


def _may_change(key: str, task: Task) -> bool:
    name, _, option = key.partition(".")
    if name == "task_options":
        return option.partition(".")[0] in task.may_change
    return find_on_resume(Settings, key) is not OnResume.LOCKED


def compute_digests(examples: Sequence[Example]) -> Tensor:
    """Return (rows, 8) bytes: a digest of each example's id, chat, answer, images and target."""
    digests = b"".join(map(_digest, examples))
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8).reshape(-1, 8)


def _digest(example: Example) -> bytes:
    images = [
        (i.name, i.size, *(i.times if isinstance(i, VideoRef) else ())) for i in example.images
    ]
    values = [example.id, example.question, example.answer, images, *map(astuple, example.history)]
    values += (value for name, value in example.meta.items() if name == TARGET_COLUMN)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def check_same_data(
    saved: Tensor, source: str, examples: Sequence[Example], settings: Settings, checkpoint: str
) -> None:
    """Refuse training examples that differ from the checkpoint's: ``saved`` has the digests of
    those, ``source`` their ``data.train``.

    The order of the examples depends on their number: with other examples, a resumed run would
    neither repeat nor complete its epoch."""
    now = compute_digests(examples)
    if torch.equal(saved, now):
        return
    common, source_now = min(len(saved), len(now)), settings.data.describe("train")
    differing = (saved[:common] != now[:common]).any(dim=1).nonzero()
    first = int(differing[0]) if len(differing) else common
    if first < len(examples):
        example = examples[first]
        difference = f"the first that differs is number {first + 1}, now {example.id!r}"
    else:
        difference = f"numbers {first + 1} to {len(saved)} are missing"
    raise UserError(
        f"the training examples have changed since {checkpoint} was written: {len(saved)} of "
        f"data.train={source} then, {len(now)} of data.train={source_now} now; "
        f"{difference} (the id, the question, the answer, and names and sizes of the images are "
        "compared). Restore the data, or start a new run with another name=…"
    )


def warn_about_versions(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warn about versions that differ from the checkpoint's, which may change the rounding."""
    changed = [
        f"{name} {saved.get(name)} → {version}"
        for name, version in now.items()
        if saved.get(name) != version
    ]
    if changed:
        logger.warning(
            "the checkpoint was written with other versions, which may change the rounding: %s",
            ", ".join(changed),
        )
