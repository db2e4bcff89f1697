"""Traces of single steps, with the memory of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vlm_grpo.utils.timing import Stopwatch

MAX_MEMORY_EVENTS = 1_000_000
"""Most allocations and frees that a snapshot of the memory holds."""


@contextlib.contextmanager
def profile_step(path: Path, stopwatch: Stopwatch, device: torch.device) -> Iterator[None]:
    """Profile the block and write its files, unless it raises.

    They are ``PATH.json.gz``, a trace of all operations in which the stopwatch's phases are named,
    and on CUDA ``PATH.memory.pickle``, all allocations with their stacks.

    Args:
        path: name of the files without the endings; its folder is created.
        stopwatch: times the phases of the block.
        device: the device of the model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    annotate, stopwatch.annotate = stopwatch.annotate, record_function
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)  # noqa: SLF001
    try:
        with profile(activities=activities) as profiler:
            yield
        if on_cuda:
            torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")  # noqa: SLF001
    finally:
        stopwatch.annotate = annotate
        if on_cuda:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
    profiler.export_chrome_trace(f"{path}.json.gz")
