"""Devices: their memory and speed."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

import torch

from vlm_grpo.engine.linear import product
from vlm_grpo.errors import UserError, nearest

GIB = 1 << 30
CONTEXT = GIB
"""Bytes used by the driver and its libraries on a GPU."""
FRAGMENTATION = 0.05
"""Share of a GPU's memory that the allocator loses to fragmentation."""


@dataclass(frozen=True)
class Device:
    """A device that a step runs on.

    Attributes:
        name: display name.
        memory: size of its memory in bytes.
        rates: FLOP/s of dense matrix products in float32 and bfloat16; None if unknown.
        bandwidth: memory bandwidth in bytes/s.
        layer_seconds: least time of one layer in a decoding step, in which Python launches its
            kernels.
        efficiency: share of ``rates`` reached by passes over full sequences.
        decode_efficiency: share of ``rates`` reached by decoding, with one token per completion.
        is_cpu: whether the device is the CPU, which uses main memory.
    """

    name: str
    memory: int
    rates: dict[str, float] | None = None
    bandwidth: float = 0.0
    layer_seconds: float = 0.0
    efficiency: float = 0.4
    decode_efficiency: float = 0.4
    is_cpu: bool = False

    @property
    def usable(self) -> int:
        """Bytes that a run can use."""
        if self.is_cpu:
            return self.memory
        return int(self.memory * (1 - FRAGMENTATION)) - CONTEXT

    def holds(self, size: int) -> bool:
        """Return whether a run can use this number of bytes."""
        return size <= self.usable


# Memory in GiB as PyTorch reports it; dense TFLOP/s in float32 (without TF32) and in bfloat16 with
# float32 accumulation; memory bandwidth in GB/s. The rates are those of the vendors' data sheets as
# other pages quote them, halved if stated with sparsity; "unverified" values were not confirmed.
# Error correction uses a sixteenth of GDDR6 memory: PyTorch reports 22.03 GiB on an L4 and 44.4 to
# 44.5 on an L40S, but 23.64 on an RTX 4090, which has none.
_GPUS: dict[str, tuple[float, float, float, float]] = {
    "RTX3090": (23.6, 35.6, 71, 936),
    "RTX4090": (23.6, 82.6, 165.2, 1008),
    "RTX5090": (31.4, 104.8, 209.5, 1792),  # unverified: memory, bfloat16
    "A10": (22.0, 31.2, 125, 600),  # unverified: memory (as the L4's), bfloat16
    "L4": (22.0, 30.3, 121, 300),
    "L40S": (44.4, 91.6, 362, 864),
    "A6000": (47.4, 38.7, 154.8, 768),  # unverified: memory, bfloat16
    "A100-40GB": (39.4, 19.5, 312, 1555),  # unverified: memory, bfloat16
    "A100-80GB": (79.1, 19.5, 312, 2039),  # unverified: memory, bfloat16, bandwidth
    "H100": (79.1, 67, 989, 3350),  # unverified: memory
    "H100-PCIe": (79.1, 51, 756, 2000),  # unverified: memory, bfloat16, bandwidth
    "H200": (139, 67, 989, 4800),
    "B200": (178, 75, 2250, 7700),  # on an HGX board; other pages have 80 TFLOP/s and 8000 GB/s
    "MI300X": (191, 163.4, 1307, 5300),  # unverified: memory, both rates
}
LAYER_SECONDS = 4e-4
"""An assumption: about 90 kernels per decoder layer, each launched from Python in about 5 µs."""


def find_device(name: str) -> Device:
    """Return a GPU by its name, or by its memory, for example ``24GB``.

    Raises:
        UserError: the GPU is not in the table.
    """
    key = re.sub(r"[\s_-]", "", name).lower().removeprefix("nvidia")
    known = {gpu.replace("-", "").lower(): gpu for gpu in _GPUS}
    if (size := re.fullmatch(r"(\d+)(?:gb|gib)", key)) is not None:
        return Device(f"a GPU of {size[1]} GB", int(size[1]) * GIB)
    if key not in known:
        raise UserError(
            f"the GPU {name!r} is not in the table{nearest(key, known)}: give its memory, for "
            f"example 24GB, or one of {', '.join(_GPUS)}"
        )
    memory, float32, bfloat16, bandwidth = _GPUS[known[key]]
    rates = {"float32": float32 * 1e12, "bfloat16": bfloat16 * 1e12}
    return Device(known[key], int(memory * GIB), rates, bandwidth * 1e9, LAYER_SECONDS)


def detect_device() -> Device:
    """Return this machine's GPU, or its CPU with the measured rates of a large matrix product."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        match = next((k for k in sorted(_GPUS, key=len) if k.split("-")[0] in gpu.name), None)
        device = find_device(match) if match is not None else Device(gpu.name, 0)
        return Device(
            gpu.name, gpu.total_memory, device.rates, device.bandwidth, device.layer_seconds
        )
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


def _measure_matmul_rate(dtype: torch.dtype, edge: int = 2048) -> float:
    """Return the best FLOP/s of five products of square matrices, with the engine's kernel."""
    a = torch.ones(edge, edge, dtype=dtype)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        product(a, a)
        best = max(best, 2 * edge**3 / (time.perf_counter() - started))
    return best
