"""RMS norms by PyTorch's fused kernel.

On a GPU transformers' RMS norm launches six to eight kernels. Each of them reads and writes all
hidden states, and the backward pass needs several float32 copies. ``rms_norm`` launches one kernel.
It rounds half-precision results once; transformers also rounds before the product with the weights.
Not run on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def use_fused_norms(model: nn.Module) -> None:
    """Let the model's RMS norms use the fused kernel where there is one.

    Their weights and names do not change. Norms of another formula stay as they are, such as
    Gemma's, which multiplies by 1 + w in float32.
    """
    for module in model.modules():
        if getattr(module, "weight", None) is not None and (fused := _fuse(type(module))):
            module.__class__ = fused


def has_kernel(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes the norm of these tensors as transformers does."""
    # transformers computes norms in float32 whatever the precision.
    return hidden.is_cuda and hidden.dtype == weight.dtype != torch.float64


@cache
def _fuse(kind: type[Any]) -> type[nn.Module] | None:
    """Return a fused class of RMS norms; None if ``kind`` is not ``w · x / √(mean(x²) + ε)``."""
    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, nn.RMSNorm):
        return None
    with torch.device("cpu"), torch.no_grad():
        hidden = torch.linspace(-2.0, 3.0, 8, dtype=torch.float32).view(2, 4)
        weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float32)
        try:
            norm = kind(4, eps=0.5).float()
            norm.weight.copy_(weight)
            is_same = torch.allclose(norm(hidden), rms_norm(hidden, (4,), weight, 0.5))
        except (TypeError, AttributeError):  # other arguments, or without weights
            return None
    names = [name for name in ("variance_epsilon", "eps") if getattr(norm, name, None) == 0.5]
    if not is_same or not names:
        return None

    class FusedNorm(kind):
        def forward(
            self, hidden_states: Float[Tensor, "*rows width"], *others: Any, **named: Any
        ) -> Tensor:
            if others or named or not has_kernel(hidden_states, self.weight):
                return super().forward(hidden_states, *others, **named)
            eps = getattr(self, names[0])
            return rms_norm(hidden_states, self.weight.shape, self.weight, eps)

    FusedNorm.__name__ = FusedNorm.__qualname__ = kind.__name__
    return FusedNorm
