"""A decoding step as one CUDA graph.

Python starts the kernels of a decoding step one by one, which on a GPU takes longer than most of
them run. A graph starts all of them at once. It repeats the very kernels that were recorded, on
the very addresses; so the step that is recorded computes every row, live or not, and reads nothing
back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from vlm_grpo.config.policy import RolloutSettings
from vlm_grpo.errors import UserError

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, positions, places in the cache), each (rows,), to logits (rows, vocabulary)."""


class Recorded(Protocol):
    """A step that can be repeated; its result is overwritten by the next call."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...


Record = Callable[[Step, tuple[Tensor, ...]], Recorded]


def recording_of(rollout: RolloutSettings, shared: bool, training: bool) -> Record | None:
    """What the recipe's decoding steps are recorded by; None: they are not.

    A run's model may be asked where it was not trained: then without a CUDA device they are not.

    Raises:
        UserError: ``cuda_graphs`` in a training without a CUDA device, or without a shared prompt.
    """
    if not rollout.cuda_graphs:
        return None
    if not torch.cuda.is_available():
        if not training:
            return None
        raise UserError("rollout.cuda_graphs=true needs a CUDA device: leave it out here")
    if not shared:
        raise UserError(
            "rollout.cuda_graphs=true has no effect where every completion repeats its prompt "
            "(policy.engine, or a family that cannot share it): leave it out"
        )
    return CudaGraph


class CudaGraph:
    """A step recorded on the current CUDA device.

    Args:
        step: has no effect but to write each row's keys and values at its place in the cache, so
            that it may run more than once.
        inputs: the first ones that the step is called with.
    """

    def __init__(self, step: Step, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Libraries allocate their workspaces in a first run, which a recording must not see.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            self._logits = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for held, tensor in zip(self._inputs, inputs, strict=True):
            held.copy_(tensor)
        self._graph.replay()
        return self._logits
