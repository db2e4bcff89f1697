"""Collecting a run's state from its parts on all ranks, and putting it back."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
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
from vlm_grpo.distributed.launch import together
from vlm_grpo.distributed.optimizer import set_rates
from vlm_grpo.distributed.sharding import gather_full
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.update import Updater
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Example

LIBRARIES = ("vlm-grpo", "torch", "transformers", "peft", "accelerate")


class Saver:
    """Collects a run's state from its parts, and gives it back to them.

    All ranks call ``save`` together: what they hold is gathered, and the first of them writes, or
    with ``checkpoint.sharded`` each a part. On ``restore`` each reads for itself. Nothing in a
    checkpoint depends on the number of ranks but the random states, of which each rank has its own.

    Args:
        settings: the run's.
        policy: its weights and processor.
        update: its optimizer, schedule and reference policy.
        examples: those that are trained on; a checkpoint keeps their fingerprints.

    Attributes:
        saved: the moment of the last checkpoint that this process began to write; None before any.
    """

    def __init__(
        self, settings: Settings, policy: Policy, update: Updater, examples: Sequence[Example]
    ) -> None:
        self.rows = row_digests(examples)
        self.settings, self.policy, self.update = settings, policy, update
        self.folder = settings.run_dir / "checkpoints"
        self.writer = Background()
        self.saved: CheckpointStep | None = None

    def save(
        self, moment: CheckpointStep, rest: CheckpointState, best: CheckpointStep | None
    ) -> None:
        """Write a checkpoint and remove those that are not to be kept.

        Args:
            moment: where the run stands.
            rest: what else of the run goes into it, the same on all ranks.
            best: the checkpoint that is kept besides the newest ones.

        Raises:
            OSError: it could not be written, or (in the background) the one before could not.
            Damaged: it reads back other than it was written.
        """
        settings, accelerator = self.settings.checkpoint, self.update.accelerator
        contents, weights = self._collect(rest), self._kept(self.update.placement.weights())
        if settings.asynchronous:
            tensors = {name: _on_host(held) for name, held in contents.tensors.items()}
            contents, weights = CheckpointState(contents.numbers, tensors), _on_host(weights)

        def write_weights(aside: Path) -> None:
            if not accelerator.is_main_process:
                self.policy.save_shard(aside, weights)
                return
            self.policy.save(aside, weights)
            self.settings.save(aside / "config.yaml")

        def write() -> None:
            write_checkpoint(self.folder, moment, contents, write_weights)
            remove_old()

        def remove_old() -> None:
            prune(self.folder, settings.keep_last, {best} if best is not None else ())

        if settings.sharded:
            write_in_parts(accelerator, self.folder, moment, contents, write_weights)
            with together(accelerator):
                if accelerator.is_main_process:
                    remove_old()
        elif accelerator.is_main_process:
            if settings.asynchronous:
                self.writer.start(write)
            else:
                write()
        self.saved = moment

    def _kept(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank writes of tensors that all ranks have, whole; all ranks call it."""
        accelerator = self.update.accelerator
        if self.settings.checkpoint.sharded:
            return gather_full(tensors, own_names(accelerator, tensors))
        return gather_full(tensors, tensors.keys() if accelerator.is_main_process else ())

    def _collect(self, rest: CheckpointState) -> CheckpointState:
        """What goes beside the weights; the ranks' parts are gathered here."""
        update = self.update
        states = gather_object([random_states()])
        shared = {"examples": {"train": self.rows}, **rest.tensors}
        return CheckpointState(
            numbers={
                **rest.numbers,
                "settings": plain_settings(self.settings),
                "pixel_budget": _plain_budget(self.policy),
                "scheduler": update.scheduler.state_dict(),
                "random": states,
                "versions": versions(),
            },
            tensors={
                "optimizer": self._kept(update.placement.optimizer_tensors()),
                "reference": self._kept(update.reference.state_dict()),
                **(shared if update.accelerator.is_main_process else {}),
            },
        )

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Put a checkpoint's state back into the parts, and return its numbers.

        The policy was loaded with its weights.

        Raises:
            UserError: the checkpoint cannot be read or does not fit.
        """
        update, numbers = self.update, read_numbers(checkpoint)
        budget = _plain_budget(self.policy)
        if budget != numbers["pixel_budget"]:
            raise UserError(
                f"{checkpoint} was trained with the pixel budget {numbers['pixel_budget']}, the "
                f"model now has {budget}: put its processor's files back as they were"
            )
        tensors = read_tensors(checkpoint, "optimizer")
        update.placement.load_optimizer_tensors(tensors)
        update.scheduler.load_state_dict(numbers["scheduler"])
        set_rates(update.placement.optimizer, update.scheduler, self.settings.optim)
        update.reference.load_state_dict(read_tensors(checkpoint, "reference"))
        states = numbers["random"]
        restore_random_states(states[update.accelerator.process_index % len(states)])
        return numbers


def checkpoint_to_resume(settings: Settings, accelerator: Accelerator) -> Path | None:
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
