"""Settings of methods beside the policy gradient: replay, distillation and masked images."""

from __future__ import annotations

from pydantic import Field, model_validator

from vlm_grpo.config.section import Frozen


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


class PerceptionSettings(Frozen):
    """Methods that score each completion once more, behind images with masked patches: PAPO
    (arXiv:2507.06448) with ``kl_coef``, and VPPO (arXiv:2510.09285) with ``top_share`` and
    ``min_scale``. The mask is PAPO's; VPPO masks half of the patches."""

    mask_ratio: float = Field(default=0.6, gt=0.0, le=1.0)
    """Probability of each patch to be black."""
    patch_size: int = Field(default=14, ge=1)
    """Side of a patch, in pixels of the resized image."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL of the policy to itself behind the masked images, which is raised; PAPO has
    0.01 to 0.02. 0: it is not."""
    top_share: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the tokens of each completion, rounded up, that the policy gradient keeps: those
    that depend most on the image. VPPO has 0.4; None: it keeps all."""
    min_scale: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Scale of the advantages of the completion that depends least on its image; those of the
    others are higher, with mean 1. VPPO has 0.9; None: all are 1."""

    @property
    def weighs_tokens(self) -> bool:
        """Whether the policy gradient has weights by dependency on the image."""
        return self.top_share is not None or self.min_scale is not None

    @model_validator(mode="after")
    def _check_effect(self) -> PerceptionSettings:
        if self.kl_coef == 0 and not self.weighs_tokens:
            raise ValueError(
                "perception has no effect alone: set its kl_coef (PAPO), or its top_share or "
                "min_scale (VPPO)"
            )
        return self
