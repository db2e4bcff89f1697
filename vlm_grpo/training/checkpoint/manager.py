"""Saving and restoring the state of a run."""

import hashlib
import json
import logging
import math
import platform
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.data import is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import GONE, OnResume, find_on_resume, flatten, known_keys
from vlm_grpo.dist.collectives import (
    any_rank,
    fail_together,
    gather_full,
    gather_object,
    get_local_names,
)
from vlm_grpo.dist.optimizer import count_state, load_optimizer_tensors, optimizer_tensors
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.training.checkpoint.store import (
    Contents,
    find_newest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_metadata,
    read_tensors,
    write_checkpoint,
)
from vlm_grpo.training.rollout import RolloutSampler
from vlm_grpo.training.schedule import set_rates
from vlm_grpo.training.update import Updater
from vlm_grpo.types import TARGET_COLUMN, Example, VideoRef

logger = logging.getLogger(__name__)

_KEYS = frozenset(known_keys(Settings))
_COMPARED_OF_SOURCE = {"task", "task_options", "tasks", "weight"}
_OF_A_COMMAND = {"name", "output_dir", "resume"}
LIBRARIES = ("vlm-grpo", "torch", "transformers", "peft", "accelerate")


@dataclass
class RunState:
    """The state of a run outside its weights, optimizer and reference."""

    step: int = 0
    best: tuple[float, int] | None = None  # the best held-out value with its step, or None
    nonfinite_steps: int = 0  # number of consecutive steps with a non-finite gradient
    # the last step's metrics if its evaluation is due and was not made; else None
    unevaluated: dict[str, float] | None = None


class CheckpointManager:
    """Saves and restores the state of a run.

    All ranks call ``save`` together: state is gathered, and the main process writes it, or with
    ``checkpoint.sharded`` every rank writes a shard. In ``restore`` every rank reads the files.
    Only the random states, one per rank, depend on the number of ranks.
    """

    def __init__(
        self,
        settings: Settings,
        updater: Updater,
        sampler: RolloutSampler,
        examples: Sequence[Example],
    ) -> None:
        self.digests = compute_digests(examples)
        self.settings, self.updater, self.sampler = settings, updater, sampler
        self.policy, self.accelerator = updater.policy, updater.strategy.accelerator
        self.folder = settings.run_dir / "checkpoints"
        self.last_saved: int | None = None  # step of the last checkpoint
        self.saved_at = time.monotonic()  # when the last one was written, or the run started
        self.origin: str | None = None  # the checkpoint resumed from, and the changed settings

    def path(self, state: RunState) -> Path:
        return self.folder / f"step-{state.step}"

    def is_saved(self, state: RunState) -> bool:
        return self.last_saved == state.step

    def is_late(self) -> bool:
        """Return whether a save by time is due on any rank. All ranks must call it."""
        seconds = self.settings.checkpoint.seconds
        return seconds < math.inf and any_rank(
            self.accelerator, time.monotonic() - self.saved_at >= seconds
        )

    def check_disk(self) -> None:
        """Raise ``UserError`` if no checkpoint fits on the run's disk; warn if those do not fit
        that the settings keep, with the next one. All ranks must call it."""
        size, settings = self._estimate_bytes(), self.settings.checkpoint
        with fail_together(self.accelerator):
            if not self.accelerator.is_main_process:
                return
            free, run_dir = shutil.disk_usage(self.settings.run_dir).free, self.settings.run_dir
            needs = f"a checkpoint of this run takes about {size / 1e9:.3g} GB"
            room = f"the disk of {run_dir} has {free / 1e9:.3g} GB free"
            if free < size:
                raise UserError(
                    f"{needs}, and {room}: make room, or set output_dir to a folder on another disk"
                )
            # A checkpoint is complete before an older one is deleted.
            wanted = (settings.keep_last or 2) + settings.keep_best + 1
            if free < (wanted - len(list_checkpoints(self.folder))) * size:
                logger.warning(
                    "%s, and %s, which is less than the %d that checkpoint.keep_last=%d needs: "
                    "make room, or keep fewer", needs, room, wanted, settings.keep_last,
                )  # fmt: skip

    def _estimate_bytes(self) -> int:
        """Estimate the bytes of weights, optimizer state and methods' state in a checkpoint."""
        policy, optimizer = self.policy, self.settings.optim.name
        trained = dict(policy.trainable_parameters())
        weights = policy.model.parameters() if policy.adapters is None else trained.values()
        size = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
        for name, weight in trained.items():
            size += count_state(name, weight.shape, optimizer, weight.dtype)
        for method in self.updater.methods.values():
            held = method.state_dict()[1].values()
            size += sum(tensor.numel() * tensor.dtype.itemsize for tensor in held)
        return size

    def save(self, state: RunState) -> None:
        """Write a checkpoint, and delete those that the settings do not keep."""
        settings, accelerator = self.settings.checkpoint, self.accelerator
        step, keep = state.step, set[int]()
        if settings.keep_best and state.best is not None:
            keep.add(state.best[1])
        contents = self._collect(state)
        weights = self._gather(self.updater.strategy.weights())

        def write_weights(folder: Path) -> None:
            if not accelerator.is_main_process:
                self.policy.save_shard(folder, weights)
                return
            self.policy.save(folder, weights)
            self.settings.save(folder / "config.yaml")

        arguments = accelerator, self.folder, step, contents, write_weights
        write_checkpoint(*arguments, sharded=settings.sharded)
        with fail_together(accelerator):
            if accelerator.is_main_process:
                prune_checkpoints(self.folder, settings.keep_last, keep)
        self.last_saved, self.saved_at = step, time.monotonic()

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the full tensors that this rank writes. All ranks must call it."""
        if self.settings.checkpoint.sharded:
            return gather_full(tensors, get_local_names(self.accelerator, tensors))
        return gather_full(tensors, tensors.keys() if self.accelerator.is_main_process else ())

    def _collect(self, state: RunState) -> Contents:
        """Collect the contents of a checkpoint except the weights. All ranks must call it."""
        updater = self.updater
        metadata: dict[str, Any] = {
            "step": state.step,
            "position": self.sampler.cursor.position,
            "best": state.best,
            "overflows": state.nonfinite_steps,
            # Lower than the settings if memory ran out; the batch size changes the rounding.
            "max_tokens": [self.sampler.budget.tokens, updater.budget.tokens],
            "settings": flatten_settings(self.settings),
            "scheduler": updater.scheduler.state_dict(),
            "random": gather_object([get_rng_states()]),
            "versions": get_versions(),
        }
        strategy = updater.strategy
        state_of_weights = optimizer_tensors(strategy.optimizer, strategy.trainable)
        tensors = {"optimizer": self._gather(state_of_weights)}
        if unused := self.sampler.unused:  # only with rollouts ahead of the steps
            metadata["unused"] = unused
        for method in updater.methods.values():
            values, own = method.state_dict()
            if values is not None:
                metadata.setdefault("methods", {})[method.name] = values
            if own:
                tensors[method.state_file] = self._gather(own)
        if state.unevaluated is not None:
            metadata["unevaluated"] = state.unevaluated
        if self.accelerator.is_main_process:
            tensors |= {"examples": {"train": self.digests}}
        return metadata, tensors

    def restore(self, checkpoint: Path) -> RunState:
        """Restore everything but the weights, which ``load_policy`` has loaded."""
        metadata = read_metadata(checkpoint)
        updater, now = self.updater, flatten_settings(self.settings)
        strategy = updater.strategy
        tensors = read_tensors(checkpoint, "optimizer")
        load_optimizer_tensors(strategy.optimizer, strategy.trainable, tensors)
        updater.scheduler.load_state_dict(metadata["scheduler"])
        set_rates(strategy.optimizer, updater.scheduler, self.settings)
        self.sampler.restore(metadata["position"], metadata.get("unused", []))
        for method in updater.methods.values():
            values = metadata.get("methods", {}).get(method.name)
            method.load_state_dict(values, read_tensors(checkpoint, method.state_file))
        for owner, tokens in zip((self.sampler, updater), metadata["max_tokens"], strict=True):
            budget = owner.budget
            # Found, or halved for lack of memory, it stays, unless the setting has changed.
            if metadata["settings"][budget.setting] == now[budget.setting]:
                budget.tokens, budget.is_found = tokens, True
        changes = list_changes(metadata["settings"], self.settings)
        texts = [text for key, text in changes.items() if key not in _OF_A_COMMAND]
        self.origin = "; ".join([str(checkpoint), *texts])
        states = metadata["random"]
        set_rng_states(states[self.accelerator.process_index % len(states)])
        best = None if metadata["best"] is None else tuple(metadata["best"])
        unevaluated = metadata.get("unevaluated")
        return RunState(metadata["step"], best, metadata["overflows"], unevaluated)


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


def get_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that can affect a run's results."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


# What a run must share with the checkpoint that it resumes from.


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


# The state of random numbers.


def get_rng_states() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch and this process's CUDA device, for JSON."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that ``get_rng_states`` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _from_hex(state: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
