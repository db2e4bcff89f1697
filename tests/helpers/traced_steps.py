"""Decode steps that are recorded and replayed on the CPU, in place of CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vlm_grpo.model.engine.graphs import DecodeStep


class TracedStep(TorchDispatchMode):
    """The operations of one step on its tensors, as a CUDA graph captures them.

    The trace runs without the step's Python code, so a step that depended on Python values would
    give wrong results, and a step that reads values from the device raises while it is traced.
    """

    traces = 0

    def __init__(self, step: DecodeStep, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        TracedStep.traces += 1
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        step(*self.inputs)  # as before a capture on a GPU
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        with self:
            self.output = step(*self.inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise RuntimeError(f"{func} reads values from the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def __call__(self, *inputs: Tensor) -> Tensor:
        values = dict(zip(map(id, self.inputs), inputs, strict=True))

        def select(tensor: Tensor) -> Tensor:
            return values.get(id(tensor), tensor)

        for func, args, kwargs, traced in self.calls:
            args, kwargs = tree_map_only(Tensor, select, (args, kwargs))
            pairs = zip(tree_leaves(traced), tree_leaves(func(*args, **kwargs)), strict=True)
            values |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}
        return select(self.output)
