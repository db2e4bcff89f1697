"""Loading a model that only one process reads, which saves host memory and file reads.

The other processes build the model with uninitialized weights. These occupy no memory
until they are used. After the strategy has placed the model on the devices, its weights are
broadcast (``distributed/collectives.py``), one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import distributed
from transformers import AutoModelForImageTextToText

from vlm_grpo.errors import UserError


def has_one_reader() -> bool:
    """Return whether the first process reads the weights for all.

    DeepSpeed distributes weights that every process has read.
    """
    is_launched = distributed.is_available() and distributed.is_initialized()
    several = is_launched and distributed.get_world_size() > 1
    return several and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")


def read_once(read: Callable[[], Any], config: Any, dtype: torch.dtype, remote_code: bool) -> Any:
    """Read the model on the first process, and build it without values on the others.

    Args:
        read: reads the model.
        config: the model's configuration.
        dtype: precision of the weights.
        remote_code: whether the model's own code may run.

    Raises:
        UserError: it cannot be read; the first process raises the actual error.
    """
    model, failure = None, None
    if distributed.get_rank() == 0:
        try:
            model = read()
        except Exception as error:  # raised below, after the others know of it
            failure = error
    news = [failure is not None, getattr(model, "generation_config", None)]
    failed, generation_config = broadcast_object_list(news)
    if failure is not None:
        raise failure
    if failed:
        raise UserError("the first process cannot read the model; its own message gives the reason")
    if model is not None:
        return model
    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=remote_code)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    model.generation_config = generation_config
    return model
