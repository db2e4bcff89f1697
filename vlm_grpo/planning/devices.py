"""Devices: their memory and speed, from a table or, of this machine, from its driver."""

import os
import re
from dataclasses import dataclass, replace

import torch

from vlm_grpo.errors import UserError, nearest

GIB = 1 << 30
CONTEXT = GIB  # bytes used by the driver and its libraries on a GPU
FRAGMENTATION = 0.05  # share of a GPU's memory that the allocator loses to fragmentation


@dataclass(frozen=True)
class Device:
    """A device that a step runs on."""

    name: str
    memory: int
    rates: dict[str, float] | None = None  # FLOP/s of dense products by precision; None: unknown
    bandwidth: float = 0.0  # of its memory in bytes/s
    layer_seconds: float = 0.0  # least time of a decoding layer's kernels in a CUDA graph
    is_cpu: bool = False
    reserved: float = 0.0  # share of the memory that other processes use

    @property
    def usable(self) -> int:
        """Bytes that a run can use."""
        free = self.memory * (1 - self.reserved)
        return int(free) if self.is_cpu else int(free * (1 - FRAGMENTATION)) - CONTEXT

    def holds(self, size: int) -> bool:
        return size <= self.usable


# By name: the pattern of the names that a driver reports, without "NVIDIA" or "AMD"; memory in GiB
# as PyTorch reports it; dense TFLOP/s in float32 without TF32, and in bfloat16 with float32
# accumulation; bandwidth of the memory in GB/s.
#
# The rates are those of NVIDIA's whitepapers (GA102, AD102, GB202, GH100) and data sheets, of AWS's
# data sheet of the A10G and of AMD's of the MI300X, some as other pages quote them; those stated
# with sparsity are halved. Variants of other names ("Laptop GPU", "D", MIG instances) differ and
# are not in the table. Error correction uses a sixteenth of GDDR6 memory: PyTorch reports 22.03 GiB
# on an L4 and 44.4 to 44.5 on an L40S, but 23.64 on an RTX 4090, which has none. The memory of GPUs
# marked with * is inferred from that.
_GPUS = {
    "RTX3090": (r"GeForce RTX 3090", 23.6, 35.6, 71, 936),
    "RTX4090": (r"GeForce RTX 4090", 23.6, 82.6, 165.2, 1008),
    "RTX5090": (r"GeForce RTX 5090", 31.4, 104.8, 209.5, 1792),  # *
    "A6000": (r"RTX A6000", 47.4, 38.7, 154.8, 768),  # *
    "RTX6000-Ada": (r"RTX 6000 Ada Generation", 47.4, 91.1, 364.2, 960),  # *
    "RTX-PRO-6000": (r"RTX PRO 6000 Blackwell.*Edition", 94.9, 125, 503.8, 1792),  # *
    "A10": (r"A10", 22.0, 31.2, 125, 600),  # *
    "A10G": (r"A10G", 22.0, 35, 70, 600),  # *
    "L4": (r"L4", 22.0, 30.3, 121, 300),
    "A40": (r"A40", 44.4, 37.4, 149.7, 696),  # *
    "L40": (r"L40", 44.4, 90.5, 181, 864),  # *
    "L40S": (r"L40S", 44.4, 91.6, 362, 864),
    "A100-40GB": (r"A100-(SXM4|PCIE)-40GB", 39.4, 19.5, 312, 1555),  # *
    "A100-80GB": (r"A100-SXM4-80GB|A100 80GB PCIe", 79.1, 19.5, 312, 2039),  # *
    "H100": (r"H100 80GB HBM3", 79.1, 67, 989, 3350),  # *
    "H100-PCIe": (r"H100 PCIe", 79.1, 51, 756, 2000),  # *
    "H100-NVL": (r"H100 NVL", 93.1, 60, 835, 3900),  # *
    "H200": (r"H200( NVL)?", 139, 67, 989, 4800),
    "B200": (r"B200", 178, 75, 2250, 7700),  # on an HGX board
    "MI300X": (r"(Instinct )?MI300X.*", 191, 163.4, 1307, 5300),  # *
}
CARDS = (12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 192)  # memory of common GPUs in GB
LAYER_SECONDS = 5e-5
"""An assumption: about 25 kernels per decoder layer, each of which takes 2 µs in a CUDA graph."""
EFFICIENCY = 0.4  # assumed share of the rates that a step reaches


def find_device(name: str) -> Device:
    """Return a GPU by its name, or by its memory, for example ``24GB``."""
    key = re.sub(r"[\s_-]", "", name).lower().removeprefix("nvidia")
    known = {gpu.replace("-", "").lower(): gpu for gpu in _GPUS}
    if (size := re.fullmatch(r"(\d+)(?:gb|gib)", key)) is not None:
        return Device(f"a GPU of {size[1]} GB", int(size[1]) * GIB)
    if key not in known:
        raise UserError(
            f"the GPU {name!r} is not in the table{nearest(key, known)}: give its memory, for "
            f"example 24GB, or one of {', '.join(_GPUS)}"
        )
    return _build_device(known[key])


def _build_device(name: str) -> Device:
    _, memory, float32, bfloat16, bandwidth = _GPUS[name]
    rates = {"float32": float32 * 1e12, "bfloat16": bfloat16 * 1e12}
    return Device(name, int(memory * GIB), rates, bandwidth * 1e9, LAYER_SECONDS)


def identify_gpu(reported: str) -> Device | None:
    """Return the GPU that a driver reports under this name; None if it is not in the table.

    >>> identify_gpu("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", reported)
    found = (key for key, (pattern, *_) in _GPUS.items() if re.fullmatch(pattern, name))
    return next(map(_build_device, found), None)


def find_peak_rate(device: torch.device, dtype: str) -> float | None:
    """Return the FLOP/s of dense matrix products on a device, if it is a GPU of the table."""
    if device.type != "cuda":
        return None
    gpu = identify_gpu(torch.cuda.get_device_name(device))
    return gpu.rates[dtype] if gpu is not None and gpu.rates is not None else None


def detect_device() -> Device:
    """Return this machine's GPU, or its CPU, whose speed is not known."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        device = identify_gpu(gpu.name) or Device(gpu.name, 0)
        return replace(device, name=gpu.name, memory=gpu.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("this machine's memory", memory, is_cpu=True)
