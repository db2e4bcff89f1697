"""Which placement a launch asks for."""

from __future__ import annotations

import importlib

from accelerate import Accelerator

from vlm_grpo.distributed.fsdp import FSDP, DataParallel
from vlm_grpo.distributed.launch import dp_replicate_size, get_deepspeed_config, get_fsdp_plugin
from vlm_grpo.model.policy import Policy


def place(policy: Policy, accelerator: Accelerator) -> DataParallel:
    """The policy's weights, placed as the launch asks for."""
    zero = get_deepspeed_config(accelerator)
    if zero is not None:  # an extra, and slow to import: for those alone who use it
        module = importlib.import_module("vlm_grpo.distributed.deepspeed_zero")
        stages = {2: module.DeepSpeedZero2, 3: module.DeepSpeedZero3}
        return stages[zero["zero_optimization"]["stage"]](policy, accelerator, zero)
    fsdp = get_fsdp_plugin(accelerator)
    if fsdp is not None:
        stream = bool(fsdp.reshard_after_forward)
        return FSDP(policy, accelerator, stream, dp_replicate_size())
    return DataParallel(policy, accelerator)
