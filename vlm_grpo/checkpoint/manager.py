"""Saving and restoring the state of a run."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from vlm_grpo.checkpoint.async_writer import Background
from vlm_grpo.checkpoint.compatibility import (
    check_same_data,
    check_same_settings,
    plain_settings,
    row_digests,
    warn_of_other_versions,
)
from vlm_grpo.checkpoint.partial_step import PartialStep, restore_step, serialize_step
from vlm_grpo.checkpoint.rng_state import random_states, restore_random_states
from vlm_grpo.checkpoint.sharded import own_names, write_in_parts
from vlm_grpo.checkpoint.store import (
    CheckpointState,
    CheckpointStep,
    checkpoints,
    newest_checkpoint,
    prune,
    read_numbers,
    read_tensors,
    write_checkpoint,
)
from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.collectives import fail_together
from vlm_grpo.distributed.optimizer import set_rates
from vlm_grpo.distributed.sharding import gather_full
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.rollout import RolloutSampler
from vlm_grpo.grpo.update import Updater
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Example

LIBRARIES = ("vlm-grpo", "torch", "transformers", "peft", "accelerate")


@dataclass
class RunState:
    """The state of a run outside its weights, optimizer and reference.

    Attributes:
        step: number of finished steps.
        best: the best held-out value with its step, or None.
        nonfinite_steps: number of consecutive steps with a non-finite gradient.
        partial: the step that was interrupted between two updates, or None.
    """

    step: int = 0
    best: tuple[float, int] | None = None
    nonfinite_steps: int = 0
    partial: PartialStep | None = None

    @property
    def checkpoint_step(self) -> CheckpointStep:
        """The name of a checkpoint in this state."""
        if self.partial is None:
            return CheckpointStep(self.step)
        return CheckpointStep(self.step, self.partial.updates.count)


class CheckpointManager:
    """Saves the state of a run, and restores it.

    All ranks call ``save`` together: state is gathered, and the main process writes it, or with
    ``checkpoint.sharded`` every rank writes a part. In ``restore`` every rank reads for itself.
    Nothing in a checkpoint depends on the number of ranks except the random states, one per rank.

    As a context it waits for the last checkpoint that is written in the background.

    Args:
        settings: the run's settings.
        updater: the policy, its optimizer, schedule and reference.
        sampler: its position in the data, and the data of a partial step.
        examples: the training examples; a checkpoint keeps their fingerprints.

    Attributes:
        saved: the checkpoint that was last written or started; None before the first.
    """

    def __init__(
        self,
        settings: Settings,
        updater: Updater,
        sampler: RolloutSampler,
        examples: Sequence[Example],
    ) -> None:
        self.rows = row_digests(examples)
        self.settings, self.updater, self.sampler = settings, updater, sampler
        self.policy, self.accelerator = updater.policy, updater.accelerator
        self.folder = settings.run_dir / "checkpoints"
        self.saved: CheckpointStep | None = None
        self._writer = Background()

    def __enter__(self) -> CheckpointManager:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def path(self, state: RunState) -> Path:
        """Return the folder of a checkpoint in this state."""
        return self.folder / state.checkpoint_step.name

    def is_saved(self, state: RunState) -> bool:
        """Return whether the last checkpoint is of this state."""
        return self.saved == state.checkpoint_step

    def check_writer(self) -> None:
        """Raise the error of a checkpoint that could not be written in the background."""
        self._writer.check()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written in the background."""
        self._writer.wait()

    def save(self, state: RunState) -> None:
        """Write a checkpoint and delete those that are not to be kept.

        Raises:
            OSError: it, or the previous one in the background, could not be written.
            CorruptCheckpoint: it reads back differently.
        """
        settings, accelerator = self.settings.checkpoint, self.accelerator
        at, keep = state.checkpoint_step, set[CheckpointStep]()
        if settings.keep_best and state.best is not None:
            keep.add(CheckpointStep(state.best[1]))
        contents = self._collect(state)
        weights = self._kept(self.updater.strategy.weights())
        if settings.asynchronous:
            tensors = {name: _on_host(held) for name, held in contents.tensors.items()}
            contents, weights = CheckpointState(contents.numbers, tensors), _on_host(weights)

        def write_weights(folder: Path) -> None:
            if not accelerator.is_main_process:
                self.policy.save_shard(folder, weights)
                return
            self.policy.save(folder, weights)
            self.settings.save(folder / "config.yaml")

        def delete_old() -> None:
            prune(self.folder, settings.keep_last, keep)

        def write() -> None:
            write_checkpoint(self.folder, at, contents, write_weights)
            delete_old()

        if settings.sharded:
            write_in_parts(accelerator, self.folder, at, contents, write_weights)
            with fail_together(accelerator):
                if accelerator.is_main_process:
                    delete_old()
        elif accelerator.is_main_process:
            if settings.asynchronous:
                self._writer.start(write)
            else:
                write()
        self.saved = at

    def _kept(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather the full tensors that this rank writes. All ranks call it."""
        if self.settings.checkpoint.sharded:
            return gather_full(tensors, own_names(self.accelerator, tensors))
        return gather_full(tensors, tensors.keys() if self.accelerator.is_main_process else ())

    def _collect(self, state: RunState) -> CheckpointState:
        """Collect the contents of a checkpoint other than the weights. All ranks call it."""
        updater = self.updater
        numbers: dict[str, Any] = {
            "step": state.step,
            "position": self.sampler.position,
            "best": state.best,
            "overflows": state.nonfinite_steps,
            # Lower than in the settings if memory ran out; the split changes the rounding.
            "max_tokens": [self.sampler.max_tokens, updater.max_tokens],
            "settings": plain_settings(self.settings),
            "pixel_budget": _plain_budget(self.policy),
            "scheduler": updater.scheduler.state_dict(),
            "random": gather_object([random_states()]),
            "versions": versions(),
        }
        tensors = {
            "optimizer": self._kept(updater.strategy.optimizer_tensors()),
            "reference": self._kept(updater.reference.state_dict()),
        }
        partial: dict[str, torch.Tensor] = {}
        if state.partial is not None:
            numbers["open_step"], partial = serialize_step(state.partial, self.policy)
        if self.accelerator.is_main_process:
            tensors |= {"examples": {"train": self.rows}}
            tensors |= {"open_step": partial} if partial else {}
        return CheckpointState(numbers, tensors)

    def restore(self, checkpoint: Path) -> RunState:
        """Restore everything but the weights, with which the policy was loaded.

        Raises:
            UserError: the checkpoint cannot be read, or does not fit the settings, data or model.
        """
        numbers = read_numbers(checkpoint)
        budget = _plain_budget(self.policy)
        if budget != numbers["pixel_budget"]:
            raise UserError(
                f"{checkpoint} was trained with the pixel budget {numbers['pixel_budget']}, the "
                f"model now has {budget}: restore the files of its processor"
            )
        self._restore_updater(checkpoint, numbers)
        self.sampler.position = numbers["position"]
        self._restore_max_tokens(numbers)
        states = numbers["random"]
        restore_random_states(states[self.accelerator.process_index % len(states)])
        best, partial = numbers["best"], None
        if "open_step" in numbers:
            with self.updater.strategy.gathered():
                partial = restore_step(
                    numbers["open_step"],
                    read_tensors(checkpoint, "open_step"),
                    self.sampler,
                    self.settings,
                    self.accelerator,
                )
        best = None if best is None else tuple(best)
        return RunState(numbers["step"], best, numbers["overflows"], partial)

    def _restore_updater(self, checkpoint: Path, numbers: Mapping[str, Any]) -> None:
        updater = self.updater
        updater.strategy.load_optimizer_tensors(read_tensors(checkpoint, "optimizer"))
        updater.scheduler.load_state_dict(numbers["scheduler"])
        set_rates(updater.strategy.optimizer, updater.scheduler, self.settings.optim)
        updater.reference.load_state_dict(read_tensors(checkpoint, "reference"))

    def _restore_max_tokens(self, numbers: Mapping[str, Any]) -> None:
        """Restore token budgets that a lack of memory lowered, if the settings are unchanged."""
        sampler, updater = numbers["max_tokens"]
        before, now = numbers["settings"], self.settings
        if before["rollout.max_tokens_per_batch"] == now.rollout.max_tokens_per_batch:
            self.sampler.max_tokens = sampler
        if before["optim.max_tokens_per_batch"] == now.optim.max_tokens_per_batch:
            self.updater.max_tokens = updater


def find_checkpoint(
    settings: Settings, accelerator: Accelerator, examples: Sequence[Example]
) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. The main process finds it.

    Raises:
        UserError: on all ranks, if the folder holds a run that is not to be resumed, all of its
            checkpoints are corrupt, or the settings or the examples differ from the checkpoint's.
    """
    checkpoint = _checkpoint_to_resume(settings, accelerator)
    if checkpoint is not None:
        check_resumable(checkpoint, settings, examples)
    return checkpoint


def _checkpoint_to_resume(settings: Settings, accelerator: Accelerator) -> Path | None:
    """The run's newest whole checkpoint, found by the first rank for all; None to begin anew.

    Raises:
        UserError: on all ranks, where there is a run that is not to be resumed, or all of its
            checkpoints are damaged.
    """
    folder = settings.run_dir / "checkpoints"
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            found = [newest_checkpoint(folder) if settings.resume else _refuse_second(settings)]
        except UserError as error:
            found = [error]
    answer = broadcast_object_list(found)[0]
    if isinstance(answer, UserError):
        raise answer
    return answer


def _refuse_second(settings: Settings) -> None:
    """Keep a new run from writing among the checkpoints of another."""
    if found := checkpoints(settings.run_dir / "checkpoints"):
        raise UserError(
            f"{settings.run_dir} holds a run with checkpoints up to step {found[-1][0].steps}: "
            "set resume=true to go on with it, or name=… for a new one"
        )


def check_resumable(checkpoint: Path, settings: Settings, examples: Sequence[Example]) -> None:
    """Find what keeps a run from going on from a checkpoint, before the model is loaded.

    Raises:
        UserError: settings or training examples are not those that it was written with.
    """
    numbers = read_numbers(checkpoint)
    saved, name = numbers["settings"], checkpoint.name
    check_same_settings(saved, settings, "open_step" in numbers, name)
    rows = read_tensors(checkpoint, "examples")["train"]
    check_same_data(rows, saved["data.train"], examples, settings, name)
    warn_of_other_versions(numbers["versions"], versions())


def _plain_budget(policy: Policy) -> dict[str, int] | None:
    return None if policy.budget is None else dataclasses.asdict(policy.budget)


def versions() -> dict[str, str]:
    """Of Python and of the libraries whose change may change a run."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory; tensors that share their memory share it in the copy too."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies or tensor.numel() == 0:
            copies[key] = tensor.detach().to("cpu", copy=True)
        found[name] = copies[key]
    return found
