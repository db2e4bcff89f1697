"""Checks that a run can resume from a checkpoint: its settings, training examples and versions."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.data import is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import OnResume, find_on_resume, flatten, known_keys
from vlm_grpo.data import load_run_task
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.types import TARGET_COLUMN, Example, ImageRef, VideoRef

logger = logging.getLogger(__name__)

_KEYS = frozenset(known_keys(Settings))
_COMPARED_OF_SOURCE = {"task", "task_options", "tasks", "weight"}


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
    saved: Mapping[str, Any],
    settings: Settings,
    checkpoint: str,
    task: Task | None = None,
) -> None:
    """Check that the settings of a run fit the checkpoint that it resumes from.

    ``saved`` has ``flatten_settings`` of the run that wrote it; the task None is that of the
    settings.
    """
    task = load_run_task(settings) if task is None else task
    now = flatten_settings(settings)
    problems = []
    for key in dict.fromkeys([*saved, *now]):
        before, after = saved.get(key), now.get(key)
        if before == after or _may_change(key, task) or _is_new_setting(key, saved):
            continue
        problems.append(f"{key} was {_format(before)} and is now {_format(after)}")
    if problems:
        raise UserError(
            f"{checkpoint} was written with other settings:\n{bullets(problems)}\n"
            "restore them to resume from it, or start a new run with another name=…"
        )


def _is_new_setting(key: str, saved: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint was written by a version without this setting."""
    blocks = [key[:end] for end, letter in enumerate(key) if letter == "."]
    return key not in saved and key in _KEYS and not any(block in saved for block in blocks)


def _may_change(key: str, task: Task) -> bool:
    name, _, option = key.partition(".")
    if name == "task_options":
        return option.partition(".")[0] in task.may_change
    return find_on_resume(Settings, key) is not OnResume.LOCKED


def _format(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _describe_image(image: ImageRef) -> tuple[Any, ...]:
    times = image.times if isinstance(image, VideoRef) else ()
    return image.name, image.size, *times


def compute_digests(examples: Sequence[Example]) -> Tensor:
    """Return (rows, 8) bytes: a digest of each example's id, chat, answer, images and target."""
    digests = [
        hashlib.blake2b(
            json.dumps(
                [
                    example.id,
                    example.question,
                    example.answer,
                    [_describe_image(image) for image in example.images],
                    *map(astuple, example.history),
                    *(value for name, value in example.meta.items() if name == TARGET_COLUMN),
                ],
                sort_keys=True,
                default=str,
            ).encode(),
            digest_size=8,
        ).digest()
        for example in examples
    ]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, 8)


def check_same_data(
    saved: Tensor, source: str, examples: Sequence[Example], settings: Settings, checkpoint: str
) -> None:
    """Check that the training examples equal those of a checkpoint, of which ``saved`` has the
    digests and ``source`` is ``data.train``.

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
