"""Threads wait awake for the next kernel, unless the user has configured how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vlm_grpo.utils.openmp import WAITING, spin_between_kernels

CHOICE = 'print(spin_between_kernels(), "torch" in sys.modules, "GOMP_SPINCOUNT" in os.environ)'
BEFORE = f"""
import os, sys
from vlm_grpo.utils.openmp import spin_between_kernels
{CHOICE}
"""
PROGRAM = f"""{BEFORE}
import torch
{CHOICE}
paths = open("/proc/self/maps").read().split()
print(len({{path for path in paths if "torch/lib/libgomp.so" in path}}))
"""


def run(environment: dict[str, str], *words: str) -> tuple[list[str], set[str]]:
    """Run Python; return its output's lines, and the settings that libgomp says it has read."""
    inherited = {name: os.environ[name] for name in os.environ if name not in WAITING}
    done = subprocess.run(
        [sys.executable, *words],
        env=inherited | environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.strip().replace("'", "") for line in done.stderr.splitlines())
    return done.stdout.splitlines(), {line for line in lines if line.startswith(tuple(WAITING))}


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
def test_libgomp_reads_the_settings_and_children_do_not():
    lines, settings = run({}, "-c", PROGRAM)
    assert lines == ["True False False", "False True False", "1"]
    assert settings == {"OMP_WAIT_POLICY = ACTIVE", "GOMP_SPINCOUNT = 300000"}
    assert run({}, "-m", "vlm_grpo.cli", "--version")[1] == settings


@pytest.mark.parametrize("environment", [{"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "5"}])
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
def test_the_users_settings_stay(environment):
    lines, settings = run(environment, "-c", BEFORE)
    assert lines == [f"False False {'GOMP_SPINCOUNT' in environment}"]
    assert not settings  # libgomp is not loaded


@pytest.mark.parametrize("preloaded", ["", "libiomp5.so"])
def test_another_library_is_left_alone(preloaded, monkeypatch):
    def fail(path: str) -> None:
        raise AssertionError(path)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("vlm_grpo.utils.openmp.ctypes.CDLL", fail)
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    else:  # PyTorch is not installed, or has no libgomp
        monkeypatch.setattr("vlm_grpo.utils.openmp.find_spec", lambda name: None)
    assert not spin_between_kernels()
