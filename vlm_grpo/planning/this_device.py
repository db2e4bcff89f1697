"""This machine's device: its name, memory and speed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cache

import torch

from vlm_grpo.model.engine.linear import product
from vlm_grpo.planning.devices import Device, identify_gpu


def find_peak_rate(device: torch.device, dtype: str) -> float | None:
    """Return the FLOP/s of dense matrix products on a device, if it is a GPU of the table."""
    if device.type != "cuda":
        return None
    gpu = identify_gpu(torch.cuda.get_device_name(device))
    return gpu.rates[dtype] if gpu is not None and gpu.rates is not None else None


def detect_device() -> Device:
    """Return this machine's GPU, or its CPU with the measured rates of a large matrix product."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        device = identify_gpu(gpu.name) or Device(gpu.name, 0)
        return replace(device, name=gpu.name, memory=gpu.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rates = {
        "float32": _measure_matmul_rate(torch.float32),
        "bfloat16": _measure_matmul_rate(torch.bfloat16),
    }
    threads = torch.get_num_threads()
    # Measured on two cores with a model of 36 million weights (perf/README.md): full passes reach
    # 0.39 to 0.66 of the product's rate. A decoding layer with 32 rows reaches 0.28 in float32; in
    # bfloat16 it is bound by many small operations and takes 1.6 ms.
    return Device(
        f"this CPU ({threads} threads)", memory, rates, 1e12, 1.6e-3, 0.43, 0.28, is_cpu=True
    )


EDGE = 2048
"""Rows and columns of the measured product."""


@cache
def _measure_matmul_rate(dtype: torch.dtype) -> float:
    a, best = torch.ones(EDGE, EDGE, dtype=dtype), 0.0
    end = time.perf_counter() + 1.0  # in bfloat16 without AMX or AVX-512, one product takes 2 s
    for _ in range(5):
        started = time.perf_counter()
        product(a, a)
        best = max(best, 2 * EDGE**3 / (time.perf_counter() - started))
        if time.perf_counter() > end:
            break
    return best
