"""Data parallelism: every rank holds all weights."""

from __future__ import annotations

from vlm_grpo.distributed.base import Strategy


class DataParallel(Strategy):
    """Data parallelism, which sums gradients after a step's last micro-batch."""

    may_retry = True

    def _place(self) -> None:
        self.policy.model.to(self.accelerator.device)
