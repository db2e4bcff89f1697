"""Streams of examples without a file."""

from __future__ import annotations

from typing import Any

from vlm_grpo.config.run import Settings
from vlm_grpo.data.stream import ExampleStream, build_stream
from vlm_grpo.types import Example

EXAMPLES = [Example(str(number), (), "?", number) for number in range(20)]


def build_mixture(counts: dict[str, int], seed: int = 0, **data: Any) -> ExampleStream:
    sources = [{"source": f"{name}.jsonl", "task": "counting", "name": name} for name in counts]
    weights = data.pop("weights", {})
    for source in sources:
        source |= {"weight": weights[source["name"]]} if source["name"] in weights else {}
    settings = Settings(seed=seed, data={"train": sources, **data})
    examples = [
        Example(f"{name}/{n}", (), "?", n, source=name)
        for name, c in counts.items()
        for n in range(c)
    ]
    return build_stream(examples, settings)
