"""InternVL and PaliGemma, which have no shared-prefix form."""

from __future__ import annotations

from typing import ClassVar

from vlm_grpo.families.base import Family


class _ThreeParts(Family):
    parts: ClassVar = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.multi_modal_projector.",),
        "language": ("model.language_model.", "lm_head."),
    }


class InternVL(_ThreeParts):
    model_types = ("internvl",)
    frame = "internvl"
    answer_tokens = r"</?(ref|box|quad)>"


class PaliGemma(_ThreeParts):
    model_types = ("paligemma",)
    frame = "paligemma"
    answer_tokens = r"<(loc|seg)\d+>"
