"""How much memory a device has and how fast it is."""

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
"""Bytes that the driver and its libraries take on a GPU."""
FRAGMENTATION = 0.05
"""Share of a GPU's memory that an allocator cannot use for want of a large enough piece."""


@dataclass(frozen=True)
class Device:
    """A device that a step runs on.

    Attributes:
        name: for people.
        memory: bytes.
        rates: FLOP/s of dense matrix products in float32 and bfloat16; None where only the
            memory is known.
        bandwidth: bytes/s of its memory.
        layer_seconds: what one layer of a decoding step costs however little it computes: the
            time in which Python starts its kernels.
        efficiency: share of ``rates`` that long passes reach.
        decode_efficiency: share of ``rates`` that passes of one token a completion reach.
        is_cpu: the main memory is the device's.
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
        """Bytes that a run can have of it."""
        if self.is_cpu:
            return self.memory
        return int(self.memory * (1 - FRAGMENTATION)) - CONTEXT


# Memory in GiB as PyTorch sees it; dense TFLOP/s in float32 (TF32 is not used) and in bfloat16
# with float32 sums; GB/s of memory. The rates are those of the makers' data sheets, halved where a
# sheet states them with sparsity; none was read in the sheet itself. "Unverified" is what no page
# that was read for this table repeats. GDDR6 with error correction gives a sixteenth of its memory
# away: messages of PyTorch give an L4 22.03 GiB, an L40S 44.4 to 44.5, and an RTX 4090, which has
# none, 23.64.
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
    "B200": (178, 75, 2250, 7700),  # of an HGX board; other pages have 80 TFLOP/s and 8000 GB/s
    "MI300X": (191, 163.4, 1307, 5300),  # unverified: memory, both rates
}
LAYER_SECONDS = 4e-4
"""About 90 kernels of a decoder layer, each started from Python in some 5 µs: an assumption."""


def named_device(name: str) -> Device:
    """A GPU by its name, or by its memory as ``24GB``.

    Raises:
        UserError: there is no such GPU in the table.
    """
    wanted = re.sub(r"[\s_-]", "", name).lower().removeprefix("nvidia")
    known = {key.replace("-", "").lower(): key for key in _GPUS}
    if (size := re.fullmatch(r"(\d+)(?:gb|gib)", wanted)) is not None:
        return Device(f"a GPU of {size[1]} GB", int(size[1]) * GIB)
    if wanted not in known:
        raise UserError(
            f"the GPU {name!r} is not in the table{nearest(wanted, known)}: give its memory, as "
            f"24GB, or one of {', '.join(_GPUS)}"
        )
    memory, wide, narrow, bandwidth = _GPUS[known[wanted]]
    rates = {"float32": wide * 1e12, "bfloat16": narrow * 1e12}
    return Device(known[wanted], int(memory * GIB), rates, bandwidth * 1e9, LAYER_SECONDS)


def this_device() -> Device:
    """The GPU of this machine, or its CPU with the rates that a large product reaches now."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        match = next((k for k in sorted(_GPUS, key=len) if k.split("-")[0] in found.name), None)
        device = named_device(match) if match is not None else Device(found.name, 0)
        return Device(
            found.name, found.total_memory, device.rates, device.bandwidth, device.layer_seconds
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rates = {"float32": _matmul_rate(torch.float32), "bfloat16": _matmul_rate(torch.bfloat16)}
    threads = torch.get_num_threads()
    # As measured on two cores with a model of 36 million weights (perf/README.md): long
    # passes at 0.39 to 0.66 of the product's rate; a layer of 32 rows at 0.28 in float32, and
    # bound by its many small operations, 1.6 ms a layer, in bfloat16.
    return Device(
        f"this CPU ({threads} threads)", memory, rates, 1e12, 1.6e-3, 0.43, 0.28, is_cpu=True
    )


def _matmul_rate(dtype: torch.dtype, edge: int = 2048) -> float:
    """FLOP/s of a product of two matrices of this edge as the engine multiplies; the best of 5."""
    a = torch.ones(edge, edge, dtype=dtype)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        product(a, a)
        best = max(best, 2 * edge**3 / (time.perf_counter() - started))
    return best
