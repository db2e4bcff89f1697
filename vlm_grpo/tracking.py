"""What a run leaves behind while it goes on: metrics by step, and samples of what it wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_grpo.types import Group


class MetricsLog:
    """``metrics.jsonl``: one line of numbers for each step.

    Args:
        path: the file.
        resume_at: drop the lines of this step and later ones, which will be run again.
    """

    def __init__(self, path: Path, resume_at: int = 0) -> None:
        self.path = path
        kept = [row for row in self.read() if row["step"] < resume_at]
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        aside.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        aside.replace(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, **metrics}))

    def read(self) -> list[dict[str, Any]]:
        """All lines; a last one cut off by a crash is left out."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def write_samples(
    folder: Path, step: int, groups: Sequence[Group], advantages: Iterable[Sequence[float]]
) -> Path:
    """``step-N.jsonl``: a line for each group, with its completions, rewards and advantages."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl"
    lines = []
    for group, values in zip(groups, advantages, strict=True):
        example = group.prompt.example
        row = {
            "step": step,
            "id": example.id,
            "images": [image.name for image in example.images],
            "prompt": group.prompt.text,
            "gold": example.answer,
            "completions": [
                {
                    "text": completion.text,
                    "stop": completion.stop,
                    "tokens": len(completion.token_ids),
                    "answer": score.answer,
                    "rewards": score.rewards,
                    "reward": score.total,
                    "metrics": score.metrics,
                    "advantage": advantage,
                }
                for completion, score, advantage in zip(
                    group.completions, group.scores, values, strict=True
                )
            ],
        }
        lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def step_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's groups say of the policy that wrote them; names follow TRL's.

    Means over completions: the reward in all and by name, the task's metrics, lengths in tokens,
    the share that was cut off, the share without an answer, entropy in nats per token.
    """
    completions = [c for group in groups for c in group.completions]
    scores = [s for group in groups for s in group.scores]
    lengths = [len(c.token_ids) for c in completions]
    entropies = [value for c in completions for value in c.entropies]
    found = {
        "reward": _mean([s.total for s in scores]),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": _mean([c.stop == "length" for c in completions]),
        "completions/answered": _mean([s.answer is not None for s in scores]),
        "entropy": _mean(entropies),
    }
    for name in scores[0].rewards:
        values = [s.rewards[name] for s in scores]
        found[f"rewards/{name}/mean"] = _mean(values)
        found[f"rewards/{name}/failed"] = sum(value is None for value in values)
    for name in scores[0].metrics:
        found[f"metrics/{name}"] = _mean([s.metrics[name] for s in scores])
    return found


def _mean(values: Iterable[float | None]) -> float:
    """The mean of those that are defined; NaN where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
