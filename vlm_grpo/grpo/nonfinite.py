"""Gradients that are not finite: the step is skipped, and after several in a row the run ends."""

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

MAX_OVERFLOWS = 5
"""Steps in a row without a finite gradient after which a run gives up."""


class Overflows:
    """Counts skipped steps, and gives up after ``MAX_OVERFLOWS`` in a row.

    Args:
        run_dir: the run's folder; the last step's completions go to ``overflow`` in it.
        rank: this process's.

    Attributes:
        count: skipped steps in a row.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank, self.count = run_dir, rank, 0

    def note(self, step: int, skipped: bool, groups: Sequence[Group], advantages: Tensor) -> None:
        """Take note of a step.

        Args:
            step: its number.
            skipped: whether an update was skipped.
            groups: this rank's, n completions in all.
            advantages: (n,).

        Raises:
            UserError: too many steps in a row were skipped; it names the file with this one.
        """
        self.count = self.count + 1 if skipped else 0
        if self.count == 1:
            logger.warning("step %d: the gradient is not finite; the update is skipped", step)
        if self.count < MAX_OVERFLOWS:
            return
        path = self.run_dir / "overflow" / f"step-{step:06d}-rank-{self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in _rows(groups, advantages.tolist())]
        write_atomic(path, "".join(lines).encode())
        raise UserError(
            f"the gradient was not finite in {self.count} steps in a row, last in step {step}, "
            f"whose completions are in {path}: go on from the last checkpoint with a lower "
            "optim.lr or policy.dtype=float32"
        )


def _rows(groups: Sequence[Group], advantages: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A row for each completion: all that the update was given, token by token."""
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
