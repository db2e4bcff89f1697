"""The states of random numbers, in the form that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def get_rng_states() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch and this process's CUDA device, for JSON."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that ``get_rng_states`` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(states["cuda"]))


def _from_hex(state: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
