"""Checkpoints that all ranks write together, one shard per rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.training.checkpoint.store import (
    CheckpointState,
    commit,
    create_tmp_dir,
    get_tmp_dir,
    merge_shards,
    write_files,
)


def write_sharded_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    state: CheckpointState,
    write_weights: Callable[[Path], None],
) -> None:
    """Write a checkpoint with one shard per rank. All ranks must call it.

    Each rank writes, flushes and reads back its files; then the first rank merges them into a
    checkpoint. If one rank fails, all of them raise and nothing remains on the disk.

    Args:
        accelerator: the ranks, which must share ``folder``.
        folder: the run's ``checkpoints``.
        step: number of finished steps.
        state: this rank's shard of the tensors; the metadata is taken from the first rank.
        write_weights: writes this rank's shard of the weights into the given folder.

    Raises:
        CorruptCheckpoint: the files read back differently.
        UserError: another rank failed.
    """
    tmp_dir, is_first = get_tmp_dir(folder, step), accelerator.is_main_process
    world = accelerator.num_processes
    shards = [f"{rank + 1:05d}-of-{world:05d}" for rank in range(world)]
    try:
        with fail_together(accelerator):
            if is_first:
                create_tmp_dir(folder, step)
        with fail_together(accelerator):
            shard_dir = tmp_dir / shards[accelerator.process_index]
            shard_dir.mkdir()
            checksums = write_files(shard_dir, state, write_weights)
        gathered = dict(zip(shards, gather_object([checksums]), strict=True))
        with fail_together(accelerator):
            if is_first:
                commit(folder, step, merge_shards(tmp_dir, gathered))
    except BaseException:
        if is_first:
            shutil.rmtree(tmp_dir, ignore_errors=True)
        raise
