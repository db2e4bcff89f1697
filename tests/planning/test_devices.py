"""Tests of the table of GPUs and of this machine's device."""

from __future__ import annotations

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.planning.devices import GIB, detect_device, find_device


@pytest.mark.parametrize(
    ("name", "gib"), [("24GB", 24), ("h100", 79.1), ("A100-40gb", 39.4), ("NVIDIA L4", 22.0)]
)
def test_gpus_are_found_by_name_or_memory(name: str, gib: float) -> None:
    # Error correction uses a sixteenth of an L4's 24 GB.
    assert find_device(name).memory == int(gib * GIB)


def test_an_unknown_gpu_is_an_error() -> None:
    with pytest.raises(UserError, match=r"did you mean h100\?.*give its memory, for example 24GB"):
        find_device("H1000")


def test_this_machine_has_memory() -> None:
    assert detect_device().usable > GIB
