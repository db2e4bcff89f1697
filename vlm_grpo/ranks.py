"""The processes of a run: how they are launched, and what they agree on."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from vlm_grpo.config import Settings
from vlm_grpo.errors import UserError

DATA_PARALLEL = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def build_accelerator(settings: Settings) -> Accelerator:
    """Devices and processes.

    Raises:
        UserError: the launch is of a kind that is not supported, or has too many processes.
    """
    # The policy sets its own precision, for rollout and update alike.
    accelerator = Accelerator(mixed_precision="no")
    if accelerator.distributed_type not in (DistributedType.NO, *DATA_PARALLEL):
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported: launch with plain data "
            "parallelism (accelerate launch --multi_gpu)"
        )
    if settings.optim.prompts_per_step < accelerator.num_processes:
        raise UserError(
            f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the number of "
            f"processes, {accelerator.num_processes}: each needs a prompt"
        )
    return accelerator


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is up on any rank, so that all of them do the same."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device)
    return bool(accelerator.reduce(flags, "sum") > 0)  # type: ignore[operator]
