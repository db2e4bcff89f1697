"""Model families: everything that depends on a model's architecture."""

from typing import Any

from vlm_grpo.families.base import Family, ImageFeatures, PixelBudget, find_part
from vlm_grpo.families.qwen import Qwen2VL, Qwen3VL, Qwen25VL
from vlm_grpo.families.repeated import InternVL, PaliGemma

__all__ = ["Family", "ImageFeatures", "PixelBudget", "find_part", "load_family"]

_FAMILIES = (Qwen2VL, Qwen25VL, Qwen3VL, InternVL, PaliGemma)


def load_family(config: Any) -> Family:
    """Return the family of a transformers configuration, or the generic one if it is unknown."""
    for family in _FAMILIES:
        if config.model_type in family.model_types:
            return family()
    return Family()
