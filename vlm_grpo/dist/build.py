"""The selection of the strategy that a launch requests."""

from __future__ import annotations

from accelerate import Accelerator

from vlm_grpo.dist.data_parallel import DataParallel
from vlm_grpo.dist.fsdp import FSDP
from vlm_grpo.dist.launch import (
    get_deepspeed_config,
    get_dp_replicate_size,
    get_fsdp_plugin,
    is_offloaded,
)
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.policy import Policy


def build_strategy(policy: Policy, accelerator: Accelerator) -> Strategy:
    """Build the strategy that the launch requests, which distributes the policy's weights."""
    config = get_deepspeed_config(accelerator)
    if config is not None:
        # Imported here: DeepSpeed is an extra, and slow to import.
        from vlm_grpo.dist.deepspeed_zero import DeepSpeedZero2, DeepSpeedZero3

        stages = {2: DeepSpeedZero2, 3: DeepSpeedZero3}
        return stages[config["zero_optimization"]["stage"]](policy, accelerator, config)
    fsdp = get_fsdp_plugin(accelerator)
    if fsdp is not None:
        stream, offload = bool(fsdp.reshard_after_forward), is_offloaded(fsdp)
        return FSDP(policy, accelerator, stream, get_dp_replicate_size(), offload)
    return DataParallel(policy, accelerator)
