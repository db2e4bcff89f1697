"""Public benchmarks: their prompts, official metrics and published results."""

from vlm_grpo.benchmarks.adapter import build_benchmark_task
from vlm_grpo.benchmarks.definition import (
    Benchmark,
    Published,
    benchmark_names,
    load_benchmark,
)
from vlm_grpo.benchmarks.held_out import get_held_out_task, load_data, load_run
from vlm_grpo.benchmarks.official import READERS
from vlm_grpo.benchmarks.rules import apply_rule, get_group
from vlm_grpo.benchmarks.script_outputs import name_files, write_files

__all__ = [
    "READERS",
    "Benchmark",
    "Published",
    "apply_rule",
    "benchmark_names",
    "build_benchmark_task",
    "get_group",
    "get_held_out_task",
    "load_benchmark",
    "load_data",
    "load_run",
    "name_files",
    "write_files",
]
