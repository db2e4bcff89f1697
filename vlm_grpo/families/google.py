"""PaliGemma and Gemma 4; Gemma 3 and 3n have no documented frame."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class PaliGemma(Family):
    model_types = ("paligemma",)
    frame = "paligemma"
    frame_source = "https://github.com/google-research/big_vision (paligemma/README.md)"
    answer_tokens = r"<(loc|seg)\d+>"
    completion_type = 1  # tokens of type 0 see each other in both directions


class Gemma4(Family):
    """Gemma 4, which writes boxes as Gemini does: y first, under ``box_2d``."""

    model_types = ("gemma4", "gemma4_unified")
    frame = "gemma4"
    frame_source = "programs that use the model (its model card was not read)"
