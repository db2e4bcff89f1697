"""How the threads of a CPU's kernels wait for the next kernel."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
"""Settings of GNU's OpenMP library. Before a thread sleeps, it checks for work as often as by
default, but 1000 instead of 100 times if there are more threads than processors."""


def spin_between_kernels() -> bool:
    """Let threads check longer for the next kernel before they sleep.

    PyTorch's wheels for Linux bring GNU's OpenMP library, libgomp. Once a process has more threads
    than processors, for example because another thread prepares prompts, libgomp lets them sleep
    at once between kernels, and waking one takes longer than many kernels of a decode step
    (``perf/README.md``). Call this before torch is imported: libgomp reads its settings when it is
    loaded. Child processes do not inherit them. It returns False, without an effect, if the user
    has configured OpenMP or loads a library first, if torch is imported already, or where PyTorch
    has no libgomp.
    """
    is_configured = any(name in os.environ for name in (*WAITING, "LD_PRELOAD"))
    spec = None if is_configured or "torch" in sys.modules else find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or []
    for library in (Path(folder, "lib", "libgomp.so.1") for folder in folders):
        if library.is_file():
            os.environ.update(WAITING)
            try:
                ctypes.CDLL(str(library))  # torch then finds it loaded
            finally:
                for name in WAITING:
                    del os.environ[name]
            return True
    return False
