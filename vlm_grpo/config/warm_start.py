"""Settings of the supervised steps at the start of a run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from vlm_grpo.config.section import Frozen

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
"""A learning rate schedule, by transformers' ``lr_scheduler_type``."""
WarmupSteps = Annotated[
    NonNegativeInt | Annotated[float, Field(gt=0, lt=1)], Field(union_mode="left_to_right")
]
"""A number of steps, or below 1, as in transformers, a share of all steps, rounded up."""


class WarmStartSettings(Frozen):
    """Supervised steps before the first rollout: cross-entropy on gold answers; by default none.

    A row with a text ``completion`` among its columns is trained on that text; for any other row
    the task writes its gold answer.
    """

    steps: int | Literal["all"] = Field(union_mode="left_to_right")
    """Number of supervised steps, which ``optim.max_steps`` includes; ``all``: every step, as with
    ``vlm-grpo sft``."""
    lr: float = Field(default=2e-5, ge=0)
    """Peak learning rate of the supervised steps; ``optim.lr`` is that of the steps after them."""
    schedule: Schedule = "linear"
    """Learning rate schedule over the supervised steps. ``optim.schedule`` and its warmup begin
    after them."""
    warmup_steps: WarmupSteps = 0
    """Number of supervised steps in which the learning rate rises to its peak; below 1: as a share
    of them; 0: no warmup."""

    @model_validator(mode="after")
    def _check_combinations(self) -> WarmStartSettings:
        if self.steps != "all" and self.steps < 1:
            raise ValueError("warm_start.steps must be at least 1, or all: remove warm_start")
        check_warmup("warm_start", self.schedule, self.warmup_steps)
        return self

    def count(self, max_steps: int) -> int:
        """Return the number of supervised steps of a run of ``max_steps`` steps."""
        return max_steps if self.steps == "all" else self.steps

    def find_problem(self, max_steps: int, warmup_steps: float) -> str | None:
        """Return what is wrong with the settings beside those of ``optim``."""
        if self.steps != "all" and self.steps >= max_steps:
            return (
                f"warm_start.steps={self.steps} leaves no step after it of "
                f"optim.max_steps={max_steps}, which counts both: raise optim.max_steps, or use "
                "vlm-grpo sft for a run of supervised steps alone"
            )
        if self.warmup_steps > self.count(max_steps):
            return (
                f"warm_start.warmup_steps={self.warmup_steps} exceeds the "
                f"{self.count(max_steps)} supervised steps: lower it"
            )
        if self.steps != "all" and warmup_steps > max_steps - self.steps:
            return (
                f"optim.warmup_steps={warmup_steps} exceeds the {max_steps - self.steps} steps "
                f"of optim.max_steps={max_steps} after those of warm_start: lower it too"
            )
        return None


def count_warmup(warmup_steps: float, steps: int) -> int:
    """Return the number of steps of a warmup, given as a number or as a share of ``steps``."""
    return math.ceil(warmup_steps * steps) if warmup_steps < 1 else int(warmup_steps)


def check_warmup(block: str, schedule: str, warmup_steps: float) -> None:
    """Raise ``ValueError`` if the schedule of a block of settings has no warmup and one is set."""
    if schedule == "constant" and warmup_steps:
        raise ValueError(
            f"{block}.warmup_steps has no effect with {block}.schedule=constant: "
            "use constant_with_warmup"
        )
