"""Build the tables of docs/benchmarks.md from their definitions; as a program, print them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm_grpo.benchmarks.definition import Benchmark, benchmark_names, load_benchmark
from vlm_grpo.tasks.graders.official_parsers import READERS, describe_reader

GUIDE = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text("utf-8")
ORDER = re.findall(r"^\| .+? \| `(\w+)` \| `", GUIDE, re.M)
"""The order of the guide's table; new ones follow."""
OVERVIEW = ("benchmark", "name", "converter", "task", "metric", "reader", "n")
PUBLISHED = ("benchmark", "published numbers")


def build_tables() -> tuple[str, str, str]:
    """Return the overview of all benchmarks, their published numbers, and the readers."""
    names = [*ORDER, *sorted(set(benchmark_names()) - set(ORDER))]
    rows = [build_cells(name) for name in names]
    published = [row for row in rows if row["published numbers"]]
    readers = [{"reader": f"`{name}`", "reads": describe_reader(name)} for name in READERS]
    return (
        format_table(OVERVIEW, rows),
        format_table(PUBLISHED, published),
        format_table(("reader", "reads"), readers),
    )


def format_table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(row[column] for column in columns)} |" for row in rows]
    return "\n".join(lines)


def build_cells(name: str) -> dict[str, str]:
    benchmark = load_benchmark(name)
    return {
        "benchmark": benchmark.title,
        "name": f"`{name}`",
        "converter": f"`{benchmark.converter}`",
        "task": benchmark.task,
        "metric": f"`{benchmark.metric}`",
        "reader": f"`{benchmark.reader}`" if benchmark.reader else "the task's",
        "n": ", ".join(f"{s} {n:,}" if n else s for s, n in benchmark.splits.items()),
        "published numbers": "; ".join(format_published(benchmark)),
    }


def format_published(benchmark: Benchmark) -> list[str]:
    """Return each model with its numbers in the order of the splits, and ✓ if verified."""
    order = list(benchmark.splits)
    found: dict[tuple[str, bool], dict[str, float]] = {}
    for number in benchmark.published:
        found.setdefault((number.model, number.verified), {})[number.split] = number.value
    texts = []
    for (model, verified), values in found.items():
        numbers = "/".join(f"{values[split]:g}" for split in order if split in values)
        where = "" if len(values) > 1 or len(order) == 1 else f" {next(iter(values))}"
        texts.append(f"{model}{where} {numbers}{' ✓' if verified else ''}")
    return texts


if __name__ == "__main__":
    print(*build_tables(), sep="\n\n")
