"""The complete runs among the cases of ``rank_cases.py``: interrupted, resumed and failing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_setup import BEGUN_BY, make_run_settings, make_settings

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.eval import generate
from vlm_grpo.eval.evaluate import evaluate_policy
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.training import trainer
from vlm_grpo.training.checkpoint.store import CheckpointState, write_sharded_checkpoint
from vlm_grpo.training.trainer import Trainer, train
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Example
from vlm_grpo.utils.timing import StepInterrupted, StopRequest


class SelfTermination(StopRequest):
    """A request that sends this process a SIGTERM while it samples the third step."""

    steps = 0

    @property
    def reason(self) -> str | None:
        """The reason, which the trainer reads before each step."""
        self.steps += 1
        return super().reason

    def check(self) -> None:
        if self.steps == 3 and self.signal is None:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.signal is not None:
            raise StepInterrupted


def train_and_read(settings: Settings) -> list[dict[str, float]]:
    """Train, and return the run's metrics.

    The end of a run destroys the process group, so a launch makes one run at most.
    """
    train(settings)
    return [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").open()]


def begin_run(folder: Path, launch: str) -> list[dict[str, float]]:
    """Make the part of a run after which other launches resume it."""
    if launch == "ddp-1":
        return train_and_read(make_run_settings(folder, launch, optim={"lr": 2e-4, "max_steps": 2}))
    # Only the last rank receives the signal.
    stop_request = SelfTermination() if _is_last_rank() else StopRequest()
    trainer.StopRequest = lambda *_: stop_request  # type: ignore[assignment, misc]
    try:
        train_and_read(make_run_settings(folder, launch))
    except Stopped as stopped:
        return [{"steps": int("after step 2 of 4" in str(stopped))}]
    raise AssertionError("the run was not stopped")


def resume_run(folder: Path, launch: str) -> list[dict[str, float]]:
    """Resume the run that another launch has begun."""
    settings = make_run_settings(folder, launch, resume=True)
    accelerator = build_accelerator(settings)
    if accelerator.is_main_process:
        shutil.copytree(settings.output_dir / BEGUN_BY[launch], settings.run_dir)
    accelerator.wait_for_everyone()
    return train_and_read(settings)


def fail_to_write_a_part(folder: Path, launch: str) -> list[Any]:
    """Write a sharded checkpoint whose last part cannot be written.

    Returns:
        This rank's error, and the names of the files that are left.
    """
    accelerator = build_accelerator(make_settings(folder, launch))
    checkpoints = folder / "failed"

    def write_weights(part: Path) -> None:
        (part / "weights").touch()
        if accelerator.is_last_process:
            raise OSError("no space")

    state = CheckpointState({}, {})
    try:
        write_sharded_checkpoint(accelerator, checkpoints, 1, state, write_weights)
    except (OSError, UserError) as error:
        return [str(error), [path.name for path in checkpoints.iterdir()]]
    return []


def run_out_of_memory(folder: Path, launch: str) -> list[str]:
    """Train until the last rank runs out of memory in its second step; return this rank's error."""
    settings = make_run_settings(folder, launch, checkpoint={"every": 1})
    is_last, backward = _is_last_rank(), Updater._backward  # noqa: SLF001

    def fail_in_second_step(self: Updater, micro: MicroBatch, *rest: Any) -> Any:
        if is_last and self.scheduler.last_epoch == 1 and len(micro.rows) > 1:
            torch.empty(1 << 50)  # a real failure to allocate
        return backward(self, micro, *rest)

    Updater._backward = fail_in_second_step  # type: ignore[method-assign] # noqa: SLF001
    try:
        train(settings)
    except UserError as error:
        rank = "last" if is_last else "first"
        (folder / f"{launch}.{rank}").write_text(str(error))
        return [str(error)]
    raise AssertionError("the run did not fail")


def run_with_a_late_rank(folder: Path, launch: str) -> None:
    """Train until the last rank hangs in its second step, which ends the processes."""
    settings = make_run_settings(folder, launch, checkpoint={"every": 1}, ddp_timeout=2)
    is_last, backward = _is_last_rank(), Updater._backward  # noqa: SLF001

    def hang_in_second_step(self: Updater, *rest: Any) -> Any:
        if is_last and self.scheduler.last_epoch == 1:
            time.sleep(200)
        return backward(self, *rest)

    Updater._backward = hang_in_second_step  # type: ignore[method-assign] # noqa: SLF001
    train(settings)


def evaluate_on_ranks(trainer: Trainer, examples: Sequence[Example]) -> list[Any]:
    """Evaluate examples that are divided among several ranks.

    Returns:
        The scores of all, and the number of outputs that this rank has scored; or the error.
    """
    generate.CHUNK_EXAMPLES = 1
    scored: list[str] = []

    def count(task: Any, texts: Any, examples: Any, **options: Any) -> Any:
        scored.extend(texts)
        return trainer.sampler.scorer(task, texts, examples, **options)

    scorer: Any = count
    try:
        with trainer.strategy.gathered():
            found = evaluate_policy(
                trainer.policy, trainer.task, examples, trainer.settings, scorer
            )
    except UserError as error:
        return [str(error)]
    return [[(row["id"], row["rewards"]["letters"]) for row in found.rows], len(scored)]


def remove_image(examples: Sequence[Example], index: int) -> list[Example]:
    """Return the examples with the image of one missing."""
    (image,) = examples[index].images
    missing = replace(image, path=Path("missing.png"))
    return [*examples[:index], replace(examples[index], images=(missing,)), *examples[index + 1 :]]


def _is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
