"""Which placement a launch asks for."""

from __future__ import annotations

import importlib

from accelerate import Accelerator

from vlm_grpo.placement import Replicas, Shards
from vlm_grpo.policy import Policy
from vlm_grpo.ranks import copies_of_shards, deepspeed_of, fsdp_of


def place(policy: Policy, accelerator: Accelerator) -> Replicas:
    """The policy's weights, placed as the launch asks for."""
    zero = deepspeed_of(accelerator)
    if zero is not None:  # an extra, and slow to import: for those alone who use it
        module = importlib.import_module("vlm_grpo.zero")
        stages = {2: module.Zero2, 3: module.Zero3}
        return stages[zero["zero_optimization"]["stage"]](policy, accelerator, zero)
    fsdp = fsdp_of(accelerator)
    if fsdp is not None:
        stream = bool(fsdp.reshard_after_forward)
        return Shards(policy, accelerator, stream, copies_of_shards())
    return Replicas(policy, accelerator)
