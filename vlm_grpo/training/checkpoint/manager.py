"""Saving and restoring the state of a run."""

import math
import random
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import any_rank, fail_together, gather_object
from vlm_grpo.dist.optimizer import load_optimizer_tensors, optimizer_tensors
from vlm_grpo.dist.weights import gather_full, get_local_names
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.checkpoint.files import (
    Contents,
    read_metadata,
    read_tensors,
    rename_for_deletion,
    write_checkpoint,
)
from vlm_grpo.training.checkpoint.resume import (
    compute_digests,
    flatten_settings,
    get_versions,
    list_changes,
)
from vlm_grpo.training.learning_rate import set_rates
from vlm_grpo.training.rollout import RolloutSampler
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Example

_OF_A_COMMAND = {"name", "output_dir", "resume"}


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

    def is_due(self, state: RunState) -> bool:
        """Return whether to save after a step. All ranks must call it.

        A step is saved if it is the best so far and the best is kept, every ``checkpoint.every``
        steps, at the end of a phase, and if the last save of any rank is too long ago.
        """
        settings, step = self.settings.checkpoint, state.step
        is_best = settings.keep_best and state.best is not None and state.best[1] == step
        is_due = bool(settings.every) and step % settings.every == 0
        if is_best or is_due or step in self.settings.phase_ends:
            return True
        is_late = time.monotonic() - self.saved_at >= settings.seconds
        return settings.seconds < math.inf and any_rank(self.accelerator, is_late)

    def save(self, state: RunState) -> None:
        """Write a checkpoint, and delete those that the settings do not keep."""
        settings, accelerator = self.settings.checkpoint, self.accelerator
        step, best = state.step, state.best
        keep = {best[1]} if settings.keep_best and best is not None else ()
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
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _from_hex(state: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


def prune_checkpoints(folder: Path, keep_last: int, keep: Collection[int] = ()) -> None:
    """Delete all checkpoints except ``keep`` and the newest ``keep_last`` (0 keeps all)."""
    found = list_checkpoints(folder)
    for step, path in found[:-keep_last] if keep_last else []:
        if step not in keep:
            shutil.rmtree(rename_for_deletion(path))
