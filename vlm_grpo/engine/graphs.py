"""CUDA graph capture of decode steps.

On a GPU, launching the kernels of a decode step one by one from Python takes longer than running
most of them. A CUDA graph launches all of them at once. It replays exactly the captured kernels
on exactly the captured addresses, so a captured step computes every row, active or not, and reads
nothing back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from vlm_grpo.config.policy import RolloutSettings
from vlm_grpo.errors import UserError

DecodeStep = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps tokens, positions and cache indices, each (rows,), to logits (rows, vocabulary)."""


class CapturedStep(Protocol):
    """A captured step; each call replays it and overwrites the previous result."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...


GraphCapture = Callable[[DecodeStep, tuple[Tensor, ...]], CapturedStep]
"""Captures a step, given the inputs of its first call."""


def get_capture(rollout: RolloutSettings, shared: bool, training: bool) -> GraphCapture | None:
    """Return the function that captures decode steps, or None if they are not captured.

    Outside training, ``cuda_graphs`` has no effect without a CUDA device, so that a trained model
    can be used on any machine.

    Raises:
        UserError: ``cuda_graphs`` is set without a shared prompt, or for training without CUDA.
    """
    if not rollout.cuda_graphs:
        return None
    if not torch.cuda.is_available():
        if not training:
            return None
        raise UserError("rollout.cuda_graphs=true needs a CUDA device: set it to false")
    if not shared:
        raise UserError(
            "rollout.cuda_graphs=true has no effect where every completion repeats its prompt "
            "(policy.engine=repeated, or a family that cannot share it): remove it"
        )
    return CudaGraph


class CudaGraph:
    """A step captured on the current CUDA device.

    Args:
        step: the step; its only side effect is to write each row's keys and values to its cache
            index, so it may run more than once.
        inputs: the inputs of the first call.
    """

    def __init__(self, step: DecodeStep, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Libraries allocate workspaces on their first call, which must not be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            self._logits = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for captured, tensor in zip(self._inputs, inputs, strict=True):
            captured.copy_(tensor)
        self._graph.replay()
        return self._logits
