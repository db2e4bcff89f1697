"""CUDA graph capture of decode steps.

On a GPU, launching the kernels of a decode step one by one from Python takes longer than running
most of them. A CUDA graph launches all of them at once. It replays exactly the captured kernels
on exactly the captured addresses, so a captured step computes every row, active or not, and reads
nothing back from the device.

``torch.compile`` leaves about a third of the kernels (``perf/README.md``); the first capture then
waits for it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm_grpo.config.rollout import RolloutSettings
from vlm_grpo.errors import UserError

DecodeStep = Callable[..., tuple[Tensor, ...]]
"""Maps the newest tokens (places,), their positions (axes, places, 1), their indices within the
completion (places,), numbers to sample with (places,), and prompt lengths and seats
(``SlotScheduler.build_index``) to the next tokens (``draw_tokens``)."""
GraphCapture = Callable[[DecodeStep, tuple[Tensor, ...]], DecodeStep]
"""Captures a step, given the inputs of its first call. Each call of what it returns replays the
step and overwrites the previous result."""
KEPT_SHARE = 0.1
"""Largest share of a device's memory that a cache may take to be kept between rollouts."""
KEPT_STEPS = 32
"""Largest number of captured steps that are kept, of about 30 MB each (by calculation)."""


def get_capture(rollout: RolloutSettings, shared: bool, training: bool) -> GraphCapture | None:
    """Return the function that captures decode steps, or None if they are not captured.

    Outside training, the settings have no effect without a CUDA device, so that a trained model
    can be used on any machine. ``UserError``: a setting has no effect, or needs CUDA for training.
    """
    if rollout.cuda_graphs is False:
        return None
    has_cuda = torch.cuda.is_available()
    for name in ("cuda_graphs", "torch_compile"):
        if getattr(rollout, name) and training and not has_cuda:
            raise UserError(f"rollout.{name}=true needs a CUDA device: remove it")
        if getattr(rollout, name) and has_cuda and not shared:
            raise UserError(
                f"rollout.{name}=true has no effect where every completion repeats its prompt "
                "(policy.engine=repeated, or a family that cannot share it): remove it"
            )
    if not (shared and has_cuda):
        return None
    return capture_compiled if rollout.torch_compile else CudaGraph


def find_cause(error: BaseException) -> BaseException:
    """Return what made a capture fail: ending a capture after an error raises another one."""
    while isinstance(error.__context__, RuntimeError) and not error.__suppress_context__:
        error = error.__context__
    return error


def compile_step(step: DecodeStep, **options: Any) -> DecodeStep:
    """Return the step with fused kernels; ``options`` are those of ``torch.compile``."""
    # Sizes are symbolic, so that steps of other sizes are not compiled again.
    compiled = torch.compile(step, dynamic=True, **options)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with warnings.catch_warnings():
            # The cached functions return constants, which may as well be computed again.
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            return compiled(*inputs)

    return run


class CudaGraph:
    """A step captured on the current CUDA device, with the inputs of its first call.

    It may run more than once, because it writes each row's keys and values to its place in the
    cache. The caller restores recurrent states.
    """

    _pool: ClassVar[Any] = None
    _alive: ClassVar[weakref.WeakSet[CudaGraph]] = weakref.WeakSet()

    def __init__(self, step: DecodeStep, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Libraries allocate workspaces on their first call, which must not be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        # Graphs share the memory of their intermediate results, which none needs afterwards. A
        # pool ends with its last graph.
        if not CudaGraph._alive:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        CudaGraph._alive.add(self)
        pool = CudaGraph._pool
        # Another thread may pin memory meanwhile, which the default mode forbids. A capture that
        # fails leaves its stream current, which the outer context resets.
        capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), capture:
                self._drawn = step(*self._inputs)
        except BaseException:
            CudaGraph._alive.discard(self)
            # PyTorch may leave the pool open, and never free its memory. Not run on a GPU.
            with contextlib.suppress(RuntimeError):  # it has closed it
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001
                torch._C._cuda_releasePool(device, pool)  # noqa: SLF001
            raise

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for captured, tensor in zip(self._inputs, inputs, strict=True):
            captured.copy_(tensor)
        self._graph.replay()
        return self._drawn


def capture_compiled(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
    return CudaGraph(compile_step(step), inputs)
