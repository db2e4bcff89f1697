"""InternVL and PaliGemma, which have no shared-prefix form."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class InternVL(Family):
    model_types = ("internvl",)
    frame = "internvl"
    answer_tokens = r"</?(ref|box|quad)>"


class PaliGemma(Family):
    model_types = ("paligemma",)
    frame = "paligemma"
    answer_tokens = r"<(loc|seg)\d+>"
    completion_type = 1  # tokens of type 0 see each other in both directions
