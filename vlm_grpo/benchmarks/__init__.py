"""Public benchmarks: how each is asked and scored, and what others have published on it."""

from vlm_grpo.benchmarks.definition import (
    Benchmark,
    Published,
    benchmark_names,
    load_benchmark,
)
from vlm_grpo.benchmarks.held_out import held_out_task
from vlm_grpo.benchmarks.rules import get_group, rule_values

__all__ = [
    "Benchmark",
    "Published",
    "benchmark_names",
    "get_group",
    "held_out_task",
    "load_benchmark",
    "rule_values",
]
