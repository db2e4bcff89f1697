"""The states of a process's random generators, in what JSON can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of this process's CUDA device."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _hex(torch.cuda.get_rng_state())
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the generators back into saved states."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
