"""Model families: everything that depends on a model's architecture."""

from typing import Any

from vlm_grpo.model.families.facts import (
    Gemma4,
    Glm,
    InternVL,
    KimiVL,
    Lfm2VL,
    Llava,
    Mistral3,
    PaddleOCRVL,
    PaliGemma,
)
from vlm_grpo.model.families.family import Family, PixelBudget, find_part
from vlm_grpo.model.families.qwen import Qwen2VL, Qwen3VL, Qwen25VL, Qwen35
from vlm_grpo.model.families.shared_form import ImageFeatures, PromptLayout

__all__ = [
    "FAMILIES",
    "Family",
    "ImageFeatures",
    "PixelBudget",
    "PromptLayout",
    "find_part",
    "load_family",
]

# Families with facts of their own; all other models have those of ``Family``.
FAMILIES = (
    *(Qwen2VL, Qwen25VL, Qwen3VL, Qwen35, InternVL, Glm),
    *(Gemma4, PaliGemma, Llava, Lfm2VL, PaddleOCRVL, Mistral3, KimiVL),
)


def load_family(config: Any) -> Family:
    """Return the family of a transformers configuration, or the generic one if it is unknown."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family()
    return Family()
