"""Settings of methods beside the policy gradient: replay and distillation."""

from __future__ import annotations

from pydantic import Field

from vlm_grpo.config.base import Frozen


class ReplaySettings(Frozen):
    """The replay of earlier groups in steps in which some groups have equal rewards."""

    size: int = Field(default=64, ge=1)
    """Maximum number of groups that are kept; the oldest leave first."""
    max_age: int = Field(default=8, ge=1)
    """Number of steps after which a group is not replayed any more."""


class DistillationSettings(Frozen):
    """On-policy distillation: a teacher scores the policy's own completions, token by token."""

    teacher: str
    """Model whose distribution the policy approaches, as the setting ``model``; one of the policy's
    family, with its tokens."""
    coef: float = Field(default=1.0, gt=0.0)
    """Weight of the reverse KL to the teacher, a mean over the step's active tokens."""
    only: bool = False
    """True: train on the teacher alone; rewards are measured, but not trained on. False: on both.
    """
