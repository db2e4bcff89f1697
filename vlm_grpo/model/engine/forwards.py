"""Other forwards for the layers of a model, whose weights and names do not change: RMS norms by
PyTorch's fused kernel, and rotary embeddings and gated activations by compiled ones.

On a GPU transformers' RMS norm launches six to eight kernels, which read and write all hidden
states. ``rms_norm`` launches one, and rounds half-precision results once; transformers also rounds
before the product with the weights.
transformers' rotation of queries and keys launches ten kernels, and its gate two; compiled, they
are two and one. Not run on a GPU.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
"""Computes a module's output from the module, its own forward as a function, and its inputs."""


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """Let ``forward(module, original, …)`` compute the module's output.

    Its class becomes a subclass, as in ``torch.nn.utils.parametrize``.
    """
    # A copy of the module then calls itself, and keeps its type. A bound function as an attribute
    # would make a reference cycle, so that a model's memory is freed only by Python's collector.
    if not has_forward(module, forward):
        module.__class__ = _derive(type(module), forward)


def restore_forward(module: nn.Module, forward: Forward) -> None:
    """Undo ``replace_forward`` where it was the last for this module."""
    if has_forward(module, forward):
        module.__class__ = type(module).__mro__[1]


def has_forward(module: nn.Module, *forwards: Forward) -> bool:
    """Return whether one of the functions computes the module's output."""
    return getattr(type(module), "replaced_by", None) in forwards


@functools.cache
def _derive(kind: type[nn.Module], forward: Forward) -> type[nn.Module]:
    original = kind.forward

    @functools.wraps(original)  # transformers reads its signature
    def run(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        return forward(self, original, *inputs, **options)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "forward": run, "replaced_by": forward})


class Compiled:
    """A function of tensors that ``torch.compile`` turns into few kernels on a GPU.

    Elsewhere, and within a step that is compiled as a whole, it stays as it is; so do all of them
    once one cannot be compiled, which a warning tells. ``recomputes``: backward needs only inputs.
    """

    mode: ClassVar[Literal["compiled", "planned", "single", "plain"]] = "compiled"
    """Of all: compiled; as a plan sees them; as they are; and norms without their kernel, too."""

    def __init__(self, function: Callable[..., Any], recomputes: bool = False) -> None:
        self.function, self.recomputes = function, recomputes

    @functools.cached_property  # the compiler takes a second to import
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function)

    def __call__(self, first: Tensor, *others: Any, **named: Any) -> Any:
        is_planned = Compiled.mode == "planned"
        if not can_compile(first) or (is_planned and not self.recomputes):
            return self.function(first, *others, **named)
        if is_planned:
            return checkpoint(self.function, first, *others, use_reentrant=False, **named)
        try:
            return self.compiled(first, *others, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            result = self.function(first, *others, **named)  # raises what is not the compiler's
            Compiled.mode = "single"
            logger.warning(
                "rotary embeddings and gates run as single operations from now on, which takes "
                "longer: torch.compile fails (%s: %s); TORCH_COMPILE_DISABLE=1 does not try",
                type(error).__name__,
                (str(error).splitlines() or ["no message"])[0],
            )
            return result


def can_compile(tensor: Tensor) -> bool:
    is_on = Compiled.mode in ("compiled", "planned")
    return is_on and tensor.is_cuda and not torch.compiler.is_compiling()


@contextlib.contextmanager
def computed(mode: Literal["planned", "single", "plain"]) -> Iterator[None]:
    """Compute rotations, gates and norms in this way inside."""
    before, Compiled.mode = Compiled.mode, mode
    try:
        yield
    finally:
        Compiled.mode = before


def use_fused_layers(model: nn.Module) -> None:
    """Let the model's RMS norms, rotations and gates use fused kernels where there are some."""
    for module in model.modules():
        forward = _find_fused(type(module))
        is_bare = forward is _normalize and getattr(module, "weight", None) is None
        if forward is not None and not is_bare:
            replace_forward(module, forward)


@functools.cache
def _find_fused(kind: type[Any]) -> Forward | None:
    # Norms of another formula stay as they are: Gemma's multiplies by 1 + w in float32.
    if _can_fuse(kind):
        return _normalize
    code = getattr(kind.forward, "__code__", None)
    if code is None:
        return None
    gated = LlamaMLP.forward.__code__  # many have the same, in the same words
    if (code.co_code, code.co_names) == (gated.co_code, gated.co_names):
        return _gate
    rotations = [name for name in _ROTATIONS if name in code.co_names]
    return _fuse_rotation(kind.forward, rotations) if rotations else None


_ROTATIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"
"""transformers' functions that rotate queries and keys, in the modules of its attention layers."""


def _fuse_rotation(forward: types.FunctionType, names: list[str]) -> Forward:
    known = forward.__globals__
    changed = {name: _compile_once(known[name]) for name in names}
    # Without a name, the compiler of whole steps does not look into the module.
    known = {name: value for name, value in known.items() if name != "__name__"} | changed
    rotating = types.FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rotating.__kwdefaults__ = forward.__kwdefaults__
    return lambda layer, _, *inputs, **named: rotating(layer, *inputs, **named)


_compile_once = functools.cache(Compiled)


def _gate(layer: Any, original: Any, x: Tensor) -> Tensor:
    if not can_compile(x):  # in an order that needs less memory
        return original(layer, x)
    return layer.down_proj(_multiply_gated(layer.gate_proj(x), layer.up_proj(x), layer.act_fn))


_multiply_gated = Compiled(lambda gate, up, activate: activate(gate) * up, recomputes=True)


def is_fused(module: nn.Module) -> bool:
    """Return whether it is a norm that uses the kernel where there is one."""
    return has_forward(module, _normalize)


def has_kernel(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes the norm of these tensors as transformers does."""
    # transformers computes norms in float32 whatever the precision.
    is_float = hidden.dtype == weight.dtype != torch.float64
    return Compiled.mode != "plain" and hidden.is_cuda and is_float


def _normalize(norm: Any, original: Any, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
    if others or named or not has_kernel(hidden_states, norm.weight):
        return original(norm, hidden_states, *others, **named)
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return rms_norm(hidden_states, norm.weight.shape, norm.weight, epsilon)


@functools.cache
def _can_fuse(kind: type[Any]) -> bool:
    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, nn.RMSNorm):
        return False
    with torch.device("cpu"), torch.no_grad():
        hidden = torch.linspace(-2.0, 3.0, 8, dtype=torch.float32).view(2, 4)
        weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float32)
        try:
            norm = kind(4, eps=0.5).float()
            norm.weight.copy_(weight)
            is_same = torch.allclose(norm(hidden), rms_norm(hidden, (4,), weight, 0.5))
        except (TypeError, AttributeError):  # other arguments, or without weights
            return False
    return is_same and 0.5 in (getattr(norm, "variance_epsilon", None), getattr(norm, "eps", None))
