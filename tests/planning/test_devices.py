"""Tests of the table of GPUs and of this machine's device."""

import pytest
import torch

from vlm_grpo.errors import UserError
from vlm_grpo.planning.devices import GIB, detect_device, find_device, find_peak_rate, identify_gpu


@pytest.mark.parametrize(
    ("name", "gib"), [("24GB", 24), ("h100", 79.1), ("A100-40gb", 39.4), ("NVIDIA L4", 22.0)]
)
def test_gpus_are_found_by_name_or_memory(name, gib):
    # Error correction uses a sixteenth of an L4's 24 GB.
    assert find_device(name).memory == int(gib * GIB)
    with pytest.raises(UserError, match=r"did you mean h100\?.*give its memory, for example 24GB"):
        find_device("H1000")


REPORTED = {
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "AMD Instinct MI300X": "MI300X",
}


def test_gpus_are_identified_by_the_name_that_the_driver_reports(monkeypatch):
    found = {reported: identify_gpu(reported) for reported in REPORTED}
    assert {reported: d and d.name for reported, d in found.items()} == REPORTED
    # Only those of the table have a peak rate.
    assert detect_device().usable > GIB
    assert find_peak_rate(torch.device("cpu"), "bfloat16") is None
    for name, rate in (("NVIDIA H200", 989e12), ("NVIDIA X1", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, own=name: own)
        assert find_peak_rate(torch.device("cuda"), "bfloat16") == rate
