"""A checkpoint that all ranks write together, each a part of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vlm_grpo.checkpoint.store import (
    CheckpointState,
    CheckpointStep,
    begin,
    complete,
    get_tmp_dir,
    join_parts,
    write_files,
)
from vlm_grpo.distributed.collectives import balance_by_cost, fail_together


def own_names(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of the tensors that this rank writes: about as many bytes as any other.

    Every tensor is written by one rank, whole, so that any program reads the files. Names of one
    tensor stay together.

    Args:
        tensors: the same names and sizes on all ranks.
    """
    distinct = {id(tensor): tensor for tensor in tensors.values()}
    costs = [tensor.numel() * tensor.element_size() for tensor in distinct.values()]
    share = balance_by_cost(costs, accelerator.num_processes)[accelerator.process_index]
    keys = list(distinct)
    mine = {keys[place] for place in share}
    return {name for name, tensor in tensors.items() if id(tensor) in mine}


def write_in_parts(
    accelerator: Accelerator,
    folder: Path,
    moment: CheckpointStep,
    contents: CheckpointState,
    write_weights: Callable[[Path], None],
) -> None:
    """Write a checkpoint as ``write_checkpoint`` does; all ranks call it, each with its part.

    Each writes, flushes and reads back its own files. Only where all of them have succeeded, the
    first makes a checkpoint of them; where one fails, none of it stays and all raise.

    Args:
        accelerator: the ranks; all of them see the same ``folder``.
        folder: the run's ``checkpoints``.
        moment: names it.
        contents: this rank's part of the tensors; the numbers are the first rank's.
        write_weights: writes this rank's part of the weights.

    Raises:
        Damaged: what the disk gives back is not what was written.
        UserError: another rank has failed.
    """
    aside, is_first = get_tmp_dir(folder, moment), accelerator.is_main_process
    world = accelerator.num_processes
    parts = [f"{rank + 1:05d}-of-{world:05d}" for rank in range(world)]
    try:
        with fail_together(accelerator):
            if is_first:
                begin(folder, moment)
        with fail_together(accelerator):
            own = aside / parts[accelerator.process_index]
            own.mkdir()
            sums = write_files(own, contents, write_weights)
        every = gather_object([sums])
        with fail_together(accelerator):
            if is_first:
                complete(folder, moment, join_parts(aside, dict(zip(parts, every, strict=True))))
    except BaseException:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
