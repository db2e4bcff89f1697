"""Handling of gradients that are not finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm_grpo.errors import UserError
from vlm_grpo.types import Group
from vlm_grpo.utils.atomic_io import write_atomic

logger = logging.getLogger(__name__)

MAX_NONFINITE_STEPS = 5
"""Number of consecutive steps with a skipped update after which a run ends."""


class NonfiniteGuard:
    """A counter of consecutive steps with a non-finite gradient, which ends the run after
    ``MAX_NONFINITE_STEPS`` and then writes the last one's completions to ``overflow`` in its
    folder.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank, self.count = run_dir, rank, 0

    def check(self, step: int, skipped: bool, groups: Sequence[Group], advantages: Tensor) -> None:
        """Count step number ``step``; ``advantages`` (n,) are those of all completions of the
        groups.
        """
        self.count = self.count + 1 if skipped else 0
        if self.count == 1:
            logger.warning("step %d: the gradient is not finite; the update is skipped", step)
        if self.count < MAX_NONFINITE_STEPS:
            return
        path = self.run_dir / "overflow" / f"step-{step:06d}-rank-{self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in _rows(groups, advantages.tolist())]
        write_atomic(path, "".join(lines).encode())
        raise UserError(
            f"the gradient was not finite in {self.count} consecutive steps; the completions of "
            f"the last one, step {step}, are in {path}: continue from the last checkpoint with a "
            "lower optim.lr or policy.dtype=float32"
        )


def _rows(groups: Sequence[Group], advantages: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield one row per completion with all inputs of the update, token by token."""
    row = 0
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            yield {
                "id": group.id,
                "images": [image.name for image in group.prompt.example.images],
                "prompt_token_ids": group.prompt.token_ids,
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "text": completion.text,
                "stop": completion.stop,
                "rewards": dict(score.rewards),
                "reward": score.total,
                "advantage": advantages[row],
            }
            row += 1
