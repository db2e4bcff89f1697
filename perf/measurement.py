"""Measurements shared by the scripts: step time, peak memory and matmul rate."""

from __future__ import annotations

import argparse
import os
import platform
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch
from PIL import Image
from random_models import build_random_model
from torch.nn import functional

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.linear import product
from vlm_grpo.planning.devices import find_peak_rate

QUESTION = "What is in the image? Describe every object that you can see in a few words."
LORA = {"r": 16, "lora_alpha": 32}


@dataclass
class Steps:
    """The steps of one engine; the first is a warm-up.

    Attributes:
        seconds: seconds of each step.
        phases: seconds of each step by phase.
        flops: FLOPs per step by phase, as in ``PhaseCosts``; empty if not counted.
        tokens: completion tokens of a step.
    """

    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    tokens: int = 0


def measure(
    options: argparse.Namespace, run: Callable[[argparse.Namespace, Any, Any, list], Steps]
) -> dict[str, Any]:
    """Build the model, run the engine's steps and return the figures.

    Args:
        options: the arguments of ``step_time.py``.
        run: runs the steps, given the options, the model, its processor and the images.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    weights = torch.float32 if options.full else dtype  # trained weights are in float32
    model, processor = build_random_model(
        options.size, weights, device, max_pixels=options.image**2
    )
    random = np.random.default_rng(0)
    shape = (options.image, options.image, 3)
    images = [
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
        for _ in range(options.prompts * (options.steps + 2))
    ]
    rate = measure_matmul_rate(dtype, device, edge=64 if options.smoke else None)
    memory = PeakMemory(device)
    try:
        steps, failed = run(options, model, processor, images), {}
    except (RuntimeError, UserError) as error:
        if "out of memory" not in str(error):
            raise
        steps, failed = Steps(), {"failed": "out of memory"}
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        **failed,
        "seconds": steps.seconds[1:],
        "phases": {name: values[1:] for name, values in steps.phases.items()},
        "memory": memory.peak(),
        "flops": steps.flops,
        "tokens": steps.tokens,
        "matmul_rate": rate,
        "peak_rate": find_peak_rate(torch.device(device), options.dtype),
        "machine": {"device": name, "threads": torch.get_num_threads(), "cores": os.cpu_count()},
    }


def measure_matmul_rate(dtype: Any, device: str, edge: int | None = None) -> float:
    """Return the FLOP/s of a large matrix product with the faster of PyTorch's two libraries."""
    edge = edge or (8192 if device == "cuda" else 2048)
    a = torch.randn(edge, edge, dtype=dtype, device=device)
    best = 0.0
    for multiply in (functional.linear, product):
        for _ in range(8):
            synchronize()
            started = time.perf_counter()
            multiply(a, a)
            synchronize()
            best = max(best, 2 * edge**3 / (time.perf_counter() - started))
    return best


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class PeakMemory:
    """Peak memory in bytes, above the memory in use at construction."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.reset()
        on_cuda = device == "cuda"
        self.before = torch.cuda.memory_allocated() if on_cuda else self._status("VmRSS")

    def reset(self) -> None:
        """Forget the peak so far."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() - self.before
        return self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {name}")


def noise_reward(text: str) -> float:
    """Return a reward that varies within every group at no cost."""
    return zlib.crc32(text.encode()) % 1000 / 1000
