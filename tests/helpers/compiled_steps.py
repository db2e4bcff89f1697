"""Decode steps that are recorded, replayed or compiled on a CPU.

The program compiles those of small models as a whole, and compares what they sample. The checks of
shapes that pytest installs cannot be compiled, so a test runs it in a process of its own.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import meta_device
import pytest
import torch
import transformers
from family_policies import build_family_policy
from gpu_standins import use_plain_varlen
from meta_device import build_policy, sample, use_gpu_kernels
from packaging.version import Version
from tiny_models import assert_same_samples, sample_groups, text_prompts, tiny_policy
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vlm_grpo.model.engine import forwards, shared
from vlm_grpo.model.engine.graphs import DecodeStep, compile_step
from vlm_grpo.model.policy import Policy

BACKEND = "aot_eager_decomp_partition"
"""PyTorch's compiler up to the operations of which Inductor writes kernels."""


class TracedStep(TorchDispatchMode):
    """The operations of one step on its tensors, as a CUDA graph captures them: a replay does not
    run the step's Python code. A step that reads a value from the device is an error."""

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

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(map(id, self.inputs), inputs, strict=True))

        def select(tensor: Tensor) -> Tensor:
            return values.get(id(tensor), tensor)

        for func, args, kwargs, traced in self.calls:
            args, kwargs = tree_map_only(Tensor, select, (args, kwargs))
            pairs = zip(tree_leaves(traced), tree_leaves(func(*args, **kwargs)), strict=True)
            values |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}
        return tuple(map(select, self.output))


class RecordedCuda:
    """A stand-in for ``torch.cuda``: the current stream, and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "main"
        self.events: list[str] = []
        pools = itertools.count(1)
        functions = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.events.append("replay")),
            "Stream": lambda: self._get_stream("side"),
            "current_stream": lambda: self._get_stream(self.current),
            "stream": self._use,
            "graph": self._capture,
            "graph_pool_handle": lambda: next(pools),
            "current_device": lambda: 0,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _get_stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.events.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    @contextlib.contextmanager
    def _use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        self.events.append(f"begin in pool {pool}, {capture_error_mode}")
        before, self.current = self.current, "capture"
        try:
            yield
        except RuntimeError:  # as in PyTorch: the end fails, too, and leaves the stream current
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.current = before
        self.events.append("end")


FAMILIES = {"gemma3": (5,), "qwen3_5": (1, 5)}
"""The numbers of words in the prompts; another number of prompts is compiled once more."""
GPU = "qwen2_5_vl on a GPU, with LoRA"
NAMES = (*FAMILIES, GPU)


def compile_whole(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
    """Trace a step without generating kernels; a graph break is an error."""
    return compile_step(step, backend="eager", fullgraph=True)


def keep_layers(policy: Policy) -> None:
    """Keep one layer of each type: another one of the same type compiles like it."""
    language_model: Any = policy.model.get_decoder()
    config, layers = language_model.config, language_model.layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    kept = sorted({kinds.index(kind) for kind in kinds})
    language_model.layers = nn.ModuleList(layers[index] for index in kept)
    config.layer_types, config.num_hidden_layers = [kinds[index] for index in kept], len(kept)
    for number, layer in enumerate(language_model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = number


def compare(family: str, words: Sequence[int]) -> None:
    """Compare what eager and compiled steps sample; one rollout compiles at most three graphs."""
    policy = build_family_policy(family, torch.float64, shared=True)
    keep_layers(policy)
    draw = partial(sample_groups, policy, text_prompts(policy, words), group_size=3, length=9)
    eager = draw()
    torch._dynamo.reset()  # noqa: SLF001
    counters.clear()
    policy.engine.use_capture(compile_whole)
    assert_same_samples(draw(), eager)
    assert 1 <= counters["stats"]["unique_graphs"] <= 3, counters["stats"]
    assert policy.describe_engine().endswith("as CUDA graphs")  # no step failed to compile


def compare_functions() -> None:
    """Compare compiled rotations and gates, and their gradients, with the functions themselves."""
    layer = tiny_policy("qwen2_5_vl").model.get_decoder().layers[0]
    rotate = inspect.unwrap(type(layer.self_attn).__mro__[1].forward).__globals__
    rotate = forwards.Compiled(rotate["apply_rotary_pos_emb"])
    gate = forwards._multiply_gated  # noqa: SLF001
    numbers = torch.linspace(-2, 3, 4 * 3 * 8, dtype=torch.float64)
    heads = numbers.view(1, 3, 4, 8).transpose(1, 2), numbers[:48].view(1, 3, 2, 8).transpose(1, 2)
    angles = numbers[:24].view(1, 3, 8)
    rows = numbers.view(3, 32).split(16, -1)
    cases = (rotate, heads, (angles.cos(), angles.sin())), (gate, rows, (layer.mlp.act_fn,))
    for function, trained, others in cases:
        compiled = torch.compile(function.function, backend=BACKEND, fullgraph=True)
        found = []
        for form in (function.function, compiled):
            inputs = [x.detach().clone().requires_grad_() for x in trained]
            outputs = form(*inputs, *others)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.stack([x.sin().sum() for x in outputs]).sum().backward()
            found.append([*outputs, *(x.grad for x in inputs)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def compare_rollouts() -> None:
    """Compare rollouts that compile rotations, gates and merges one by one, as on a GPU."""
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, layers=1)
    draw = partial(sample_groups, policy, text_prompts(policy, (0, 3)), group_size=2, length=3)
    expected = draw()

    def can_compile(tensor: Tensor) -> bool:
        return forwards.Compiled.mode == "compiled" and not torch.compiler.is_compiling()

    def build(compiled: forwards.Compiled) -> Any:
        return torch.compile(compiled.function, backend=BACKEND)

    for parts in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            use_plain_varlen(patch, parts)
            patch.setattr(forwards, "can_compile", can_compile)
            patch.setattr(forwards.Compiled, "compiled", property(build))
            assert_same_samples(draw(), expected)
        assert forwards.Compiled.mode == "compiled"  # no function failed to compile


def main() -> None:
    torch.set_num_threads(1)
    compare_functions()
    compare_rollouts()
    shared.LENGTH_BUCKET = 4  # several captures per rollout
    for family, words in FAMILIES.items():
        if Version(transformers.__version__) >= Version("5.21"):  # earlier ones share Qwen's only
            compare(family, words)
        print(family, flush=True)
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_kernels(patch)
        # A step is not compiled while its operations are checked one by one.
        patch.setattr(meta_device, "no_host_tensors", contextlib.nullcontext)
        policy = build_policy("qwen2_5_vl", lora=True)
        keep_layers(policy)
        policy.engine.use_capture(compile_whole)
        assert sample(policy, patch) > 0
        assert policy.describe_engine().endswith("as CUDA graphs")  # no step failed to compile
    print(GPU)  # the meta device has no values to compare


if __name__ == "__main__":
    sys.exit(main())
