"""Measurements shared by the scripts: step time, peak memory and matmul rate."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from random_models import build_random_model
from torch.nn import functional

from vlm_grpo.engine.linear import product

QUESTION = "What is in the image? Describe every object that you can see in a few words."
LORA = {"r": 16, "lora_alpha": 32}


def measure(options: argparse.Namespace, run: Callable) -> None:
    """Build the model, run the engine's steps and print the figures as JSON.

    Args:
        run: (options, model, processor, images) → seconds per step, seconds per step by phase, and
            FLOPs per step (0 if not counted). The first step is a warm-up and is not reported.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    model, processor = build_random_model(options.size, dtype, device, max_pixels=options.image**2)
    random = np.random.default_rng(0)
    shape = (options.image, options.image, 3)
    images = [
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
        for _ in range(options.prompts * (options.steps + 1))
    ]
    rate = measure_matmul_rate(dtype, device)
    memory = PeakMemory(device)
    seconds, phases, flops = run(options, model, processor, images)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    figures = {
        "seconds": seconds[1:],
        "phases": {name: values[1:] for name, values in phases.items()},
        "memory": memory.peak(),
        "flops": flops,
        "matmul_rate": rate,
        "machine": {"device": name, "threads": torch.get_num_threads(), "cores": os.cpu_count()},
    }
    print(json.dumps(figures))


def measure_matmul_rate(dtype: Any, device: str) -> float:
    """Return the FLOP/s of a large matrix product with the faster of PyTorch's two libraries."""
    edge = 8192 if device == "cuda" else 2048
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
    """Peak memory in bytes since construction, above the memory in use at construction."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self.before = self._status("VmRSS")

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
