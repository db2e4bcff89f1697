"""Public benchmarks: how each is asked and scored, and what others have published on it."""

from vlm_grpo.benchmarks.definition import (
    Benchmark,
    Published,
    benchmark_names,
    load_benchmark,
)
from vlm_grpo.benchmarks.held_out import held_out_task
from vlm_grpo.benchmarks.rules import group_of, rule_values

__all__ = [
    "Benchmark",
    "Published",
    "benchmark_names",
    "group_of",
    "held_out_task",
    "load_benchmark",
    "rule_values",
]
