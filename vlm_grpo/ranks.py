"""The processes of a run: how they are launched, and what they agree on."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from vlm_grpo.config import Settings
from vlm_grpo.errors import UserError

DATA_PARALLEL = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def build_accelerator(settings: Settings) -> Accelerator:
    """Devices and trackers.

    Raises:
        UserError: the launch is of a kind that is not supported or has too many processes, or a
            tracker that the settings name is not installed.
    """
    trackers: list[Any] = list(settings.logging.trackers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`log_with=")  # said below, as an error
        accelerator = Accelerator(
            mixed_precision="no",  # the policy sets its own, for rollout and update alike
            log_with=trackers or None,
            project_dir=settings.run_dir,
        )
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
    if len(accelerator.log_with) < len(trackers):
        raise UserError(
            f"logging.trackers={trackers}: not all of them are installed; pip install them or "
            "leave them out"
        )
    return accelerator


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is up on any rank, so that all of them do the same."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device)
    return bool(accelerator.reduce(flags, "sum") > 0)  # type: ignore[operator]
