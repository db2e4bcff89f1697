"""Saving and restoring the state of a run."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import fail_together, gather_object, get_local_names
from vlm_grpo.dist.sharding import Deferred, gather_full, local_shard
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import snapshot_on_host
from vlm_grpo.task import Task
from vlm_grpo.training.checkpoint.compatibility import (
    check_same_data,
    check_same_settings,
    compute_digests,
    flatten_settings,
    warn_about_versions,
)
from vlm_grpo.training.checkpoint.state import get_rng_states, set_rng_states
from vlm_grpo.training.checkpoint.store import (
    CheckpointState,
    find_newest_checkpoint,
    get_name,
    list_checkpoints,
    prune_checkpoints,
    read_metadata,
    read_tensors,
    write_checkpoint,
    write_sharded_checkpoint,
)
from vlm_grpo.training.rollout import RolloutSampler
from vlm_grpo.training.schedule import set_rates
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

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

    Attributes:
        last_saved: step of the last checkpoint written or started; None before the first.
        writer: writes checkpoints in the background.
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
        self.last_saved: int | None = None
        self.writer = AsyncWriter()

    def path(self, state: RunState) -> Path:
        return self.folder / get_name(state.step)

    def is_saved(self, state: RunState) -> bool:
        return self.last_saved == state.step

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

        def delete_old() -> None:
            prune_checkpoints(self.folder, settings.keep_last, keep)

        def write() -> None:
            write_checkpoint(self.folder, step, contents, write_weights)
            delete_old()

        if settings.sharded:
            write_sharded_checkpoint(accelerator, self.folder, step, contents, write_weights)
            with fail_together(accelerator):
                if accelerator.is_main_process:
                    delete_old()
        elif accelerator.is_main_process:
            if settings.asynchronous:
                self.writer.start(write)
            else:
                write()
        self.last_saved = step

    def _gather(self, tensors: Mapping[str, torch.Tensor | Deferred]) -> dict[str, torch.Tensor]:
        """Gather the full tensors that this rank writes. All ranks must call it.

        An asynchronous checkpoint gets copies of those that training changes.
        """
        if self.settings.checkpoint.sharded:
            return gather_full(tensors, get_local_names(self.accelerator, tensors))
        full = gather_full(tensors, tensors.keys() if self.accelerator.is_main_process else ())
        if not self.settings.checkpoint.asynchronous:
            return full
        live = {name: tensor for name, tensor in full.items() if _is_live(tensor, tensors[name])}
        return full | _copy_to_host(live)

    def _collect(self, state: RunState) -> CheckpointState:
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
            "pixel_budget": _get_pixel_budget(self.policy),
            "scheduler": updater.scheduler.state_dict(),
            "random": gather_object([get_rng_states()]),
            "versions": get_versions(),
        }
        tensors = {
            "optimizer": self._gather(updater.strategy.optimizer_tensors()),
        }
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
        return CheckpointState(metadata, tensors)

    def restore(self, checkpoint: Path) -> RunState:
        """Restore everything but the weights, which ``load_policy`` has loaded."""
        metadata = read_metadata(checkpoint)
        budget = _get_pixel_budget(self.policy)
        if budget != metadata["pixel_budget"]:
            raise UserError(
                f"{checkpoint} was trained with the pixel budget {metadata['pixel_budget']}, the "
                f"model now has {budget}: restore the files of its processor"
            )
        self._restore_updater(checkpoint, metadata)
        self.sampler.restore(metadata["position"], metadata.get("unused", []))
        for method in self.updater.methods.values():
            values = metadata.get("methods", {}).get(method.name)
            method.load_state_dict(values, read_tensors(checkpoint, method.state_file))
        self._restore_max_tokens(metadata)
        states = metadata["random"]
        set_rng_states(states[self.accelerator.process_index % len(states)])
        best = None if metadata["best"] is None else tuple(metadata["best"])
        unevaluated = metadata.get("unevaluated")
        return RunState(metadata["step"], best, metadata["overflows"], unevaluated)

    def _restore_updater(self, checkpoint: Path, metadata: Mapping[str, Any]) -> None:
        updater = self.updater
        updater.strategy.load_optimizer_tensors(read_tensors(checkpoint, "optimizer"))
        updater.scheduler.load_state_dict(metadata["scheduler"])
        set_rates(updater.strategy.optimizer, updater.scheduler, self.settings)

    def _restore_max_tokens(self, metadata: Mapping[str, Any]) -> None:
        """Restore token budgets that were halved for lack of memory, unless settings changed."""
        sampler, updater = metadata["max_tokens"]
        before, now = metadata["settings"], self.settings
        if before["rollout.max_tokens_per_batch"] == now.rollout.max_tokens_per_batch:
            self.sampler.budget.tokens = sampler
        if before["optim.max_tokens_per_batch"] == now.optim.max_tokens_per_batch:
            self.updater.budget.tokens = updater


def find_checkpoint(
    settings: Settings, accelerator: Accelerator, examples: Sequence[Example], task: Task
) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. The main process selects it.

    ``UserError``, on all ranks: the folder holds a run and ``resume`` is False, all of its
    checkpoints are corrupt, or settings or examples differ from the checkpoint's."""
    result: list[Any] = [None]
    if accelerator.is_main_process:
        folder = settings.run_dir / "checkpoints"
        try:
            if settings.resume:
                result = [find_newest_checkpoint(folder)]
            elif found := list_checkpoints(folder):
                raise UserError(
                    f"{settings.run_dir} holds a run with checkpoints up to step {found[-1][0]}: "
                    "continue it with resume=true, or start a new run with another name=…"
                )
        except UserError as error:
            result = [error]
    checkpoint = broadcast_object_list(result)[0]
    if isinstance(checkpoint, UserError):
        raise checkpoint
    if checkpoint is not None:
        check_resumable(checkpoint, settings, examples, task)
    return checkpoint


def check_resumable(
    checkpoint: Path, settings: Settings, examples: Sequence[Example], task: Task
) -> None:
    """Check settings and training examples against a checkpoint, before the model is loaded."""
    metadata = read_metadata(checkpoint)
    saved, name = metadata["settings"], checkpoint.name
    check_same_settings(saved, settings, name, task)
    digests = read_tensors(checkpoint, "examples")["train"]
    check_same_data(digests, saved["data.train"], examples, settings, name)
    warn_about_versions(metadata["versions"], get_versions())


def _get_pixel_budget(policy: Policy) -> dict[str, int] | None:
    """Return the bounds that the processor's files may set; that of videos is a setting alone."""
    budget = policy.budget
    names = "min_pixels", "max_pixels"
    return None if budget is None else {name: getattr(budget, name) for name in names}


def get_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that can affect a run's results."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def _is_live(tensor: torch.Tensor, source: torch.Tensor | Deferred) -> bool:
    """Return whether the result of ``gather_full`` is its source, and not a copy already."""
    if isinstance(source, Deferred):
        return False
    local = local_shard(source)
    return tensor is source or tensor.untyped_storage().data_ptr() == local.data_ptr()


def _copy_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to host memory; tensors that share memory also share their copy."""
    distinct: dict[tuple[Any, ...], torch.Tensor] = {}
    keys = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        keys[name] = key if tensor.numel() else (name,)
        distinct[keys[name]] = tensor
    copies = dict(zip(distinct, snapshot_on_host([*distinct.values()]), strict=True))
    return {name: copies[key] for name, key in keys.items()}


class AsyncWriter:
    """A thread that runs jobs one after the other and raises their errors in the caller.

    As a context manager it waits for the last job on exit, except after an interrupt. The thread
    does not keep the process alive, as those of ``concurrent.futures`` do.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
            logger.exception("a background job failed too")  # the caller's error must be raised

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, raise its error, or start this one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a finished job, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the job, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # raised again in the main thread
            self._error = error
