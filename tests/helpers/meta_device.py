"""A policy on the meta device, which stands in for a GPU with its kernels.

It computes shapes only: reading a value is an error, as is a shape that depends on values.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from recorded import record_calls
from tiny_models import add_lora, image_prompts, tiny_policy
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vlm_grpo.model.engine import forwards, kernels
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.sampling import SamplerState, SamplingSettings
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion

DEVICE = torch.device("meta")
SIZES = [[(56, 56), (84, 28)], [(28, 56)], []]
"""The images of prompts."""


class _NoHostTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        on_device = {DEVICE} & {*(x.device for x in tensors), kwargs.get("device")}
        on_host = any(x.dim() and x.device.type == "cpu" for x in tensors)
        is_copy = name in ("copy_", "_to_copy")
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        if on_device and on_host and (waits or not is_copy):
            raise RuntimeError(f"{name} waits for a copy of a tensor on the host")
        return func(*args, **kwargs)


class _NoHostValues(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__") and args[0].device == DEVICE:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list | np.ndarray) for part in index):
                raise RuntimeError(f"{name} waits for a copy of an index on the host")
        if name in ("tensor", "as_tensor", "new_tensor") and result.device == DEVICE:
            data = args[name == "new_tensor"]
            if not (isinstance(data, Tensor) and data.device == DEVICE):
                raise RuntimeError(f"{name} waits for a copy of values on the host")
        return result


@contextmanager
def no_host_tensors() -> Iterator[None]:
    """Refuse what the meta device allows and CUDA waits for: indices and values of ``torch.tensor``
    on the host, and copies that are not asked to be non-blocking. Tensors without dimensions are
    allowed, which CUDA gets with the call."""
    with _NoHostValues(), _NoHostTensors():
        yield


def build_policy(
    family: str, lora: bool, targets: Sequence[str] = ("q_proj", "down_proj"), layers: int = 3
) -> Policy:
    """Build a policy whose model is on the device, in bfloat16."""
    host = tiny_policy(family, layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = type(host.model)(host.model.config)
            use_shared_attention(host.family, model)
            loaded = LoadedModel(model, host.prompts, True, None)
            policy = Policy(loaded, host.distribution, chunk_tokens=7)
            if lora:
                add_lora(policy, list(targets))
    finally:
        torch.set_default_dtype(torch.float32)
    return policy


_LIBRARY = torch.library.Library("standin", "DEF")
_LIBRARY.define("kernel(Tensor[] read, Tensor[] written) -> ()")
_LIBRARY.impl("kernel", lambda read, written: None, "Meta")


class _OneKernel(torch.autograd.Function):
    """A function of a GPU's kernels, one for each shape of its outputs, in place of its operations;
    its backward pass has as many, which write the gradients of the inputs that need one."""

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
        with _disable_current_modes():
            found = function(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.inputs = [isinstance(x, Tensor) for x in inputs]
        ctx.needs = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        _count_kernels(inputs, outputs)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if is_tensor else None for is_tensor in ctx.inputs]
        with _disable_current_modes():
            needed = (x if needs else None for x, needs in zip(inputs, ctx.needs, strict=True))
            grads = [None if x is None else torch.empty_like(x) for x in needed]
        _count_kernels((*grad_outputs, *inputs), grads)
        return None, *grads


def _count_kernels(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Dispatch one operation for each shape of outputs, which reads the inputs of that shape, and
    all whose shape no output has."""
    shapes = {x.shape for x in outputs if x is not None}
    for shape in shapes:
        read = [x for x in inputs if isinstance(x, Tensor) and x.shape == shape]
        read += [x for x in inputs if isinstance(x, Tensor) and x.shape not in shapes]
        written = [x for x in outputs if x is not None and x.shape == shape]
        torch.ops.standin.kernel(read, written)


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine take the way of a GPU, with stand-ins for kernels that are not PyTorch's own:
    as many as its compiler would generate (``perf/README.md``)."""
    norm = forwards.rms_norm

    def has_standins(tensor: Tensor) -> bool:
        return tensor.device == DEVICE and not torch.compiler.is_compiling()

    def normalize(hidden: Tensor, shape: Any, weight: Tensor, epsilon: float) -> Any:
        if not has_standins(hidden):
            return norm(hidden, shape, weight, epsilon)
        return _OneKernel.apply(lambda x, *_: torch.empty_like(x), hidden, weight)

    monkeypatch.setattr(forwards, "rms_norm", normalize)
    monkeypatch.setattr(forwards, "can_compile", has_standins)
    compiled = property(lambda self: lambda *inputs: _OneKernel.apply(self.function, *inputs))
    monkeypatch.setattr(forwards.Compiled, "compiled", compiled)
    monkeypatch.setattr(kernels, "has_varlen", lambda query: True)
    monkeypatch.setattr(kernels, "count_parts", lambda *_: 1)
    monkeypatch.setattr(forwards, "has_kernel", lambda hidden, weight: True)
    # Autocast does not know the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)


def sample(policy: Policy, monkeypatch: pytest.MonkeyPatch, **truncation: float) -> int:
    """Sample completions of different lengths and return the number of decode steps."""
    all_active, some_active = np.ones(6, dtype=bool), np.array([1, 0, 0, 1, 1, 1], dtype=bool)
    reads = iter([all_active, all_active, some_active, some_active, ~all_active])
    monkeypatch.setattr(SamplerState, "update_active", lambda state: next(reads))
    done = Completion((1,), (0.0,), "", "eos")
    monkeypatch.setattr(Policy, "_build_completions", lambda policy, state: [done] * state.count)
    steps = record_calls(monkeypatch, SharedEngine, "step")
    prompts = image_prompts(policy, SIZES)
    settings = SamplingSettings(
        dataclasses.replace(policy.distribution, min_new_tokens=2),
        40,
        with_entropies=True,
        **truncation,  # type: ignore[arg-type]
    )
    with no_host_tensors():
        policy.sample(prompts, settings, 2, [(0, index) for index in range(3)])
    return len(steps)
