"""The guides' tables of benchmarks, as they follow from the definitions.

Run it to print them: ``python tests/benchmark_table.py``.
"""

from __future__ import annotations

from vlm_grpo.benchmarks import Benchmark, benchmark_names, load_benchmark

ORDER = [
    "refcoco",
    "refcocoplus",
    "refcocog",
    "ref_l4",
    "lisa_grounding",
    "reason_seg",
    "flickr30k",
    "coco",
    "ovdeval",
    "clevr",
    "super_clevr_200",
    "tallyqa",
    "countbenchqa",
    "pixmo_count",
    "fsc147",
    "ocrbench",
    "ocrbench_v2",
    "textvqa",
    "docvqa",
    "infovqa",
    "stvqa",
    "iiit5k",
    "icdar2015",
    "sroie",
]
"""Grounding, detection, counting, OCR; one that is not named here comes last."""
HEADS = {
    "README.md": ("benchmark", "converter", "command", "metric", "published"),
    "docs/benchmarks.md": ("benchmark", "name", "converter", "task", "metric", "n", "published"),
}


def table(guide: str) -> list[str]:
    """The lines of a guide's table."""
    heads = HEADS[guide]
    names = [*ORDER, *sorted(set(benchmark_names()) - set(ORDER))]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name in names:
        cells = cells_of(name)
        lines.append(f"| {' | '.join(cells[head] for head in heads)} |")
    return lines


def cells_of(name: str) -> dict[str, str]:
    benchmark = load_benchmark(name)
    return {
        "benchmark": benchmark.title,
        "name": f"`{name}`",
        "converter": f"`{benchmark.converter}`",
        "command": f"`vlm-grpo evaluate {name}`",
        "task": benchmark.task,
        "metric": f"`{benchmark.metric}`",
        "n": ", ".join(f"{s} {n:,}" if n else s for s, n in benchmark.splits.items()),
        "published": "; ".join(published(benchmark)) or "–",
    }


def published(benchmark: Benchmark) -> list[str]:
    """Each model with its numbers in the order of the splits; ✓ where they were verified."""
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
    for guide in HEADS:
        print(guide, *table(guide), sep="\n", end="\n\n")
