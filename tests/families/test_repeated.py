"""The parts of InternVL and PaliGemma."""

from __future__ import annotations

import torch
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from vlm_grpo.families import load_family


def test_the_three_parts_cover_all_weights() -> None:
    with torch.device("meta"):
        models = [
            InternVLForConditionalGeneration(InternVLConfig()),
            PaliGemmaForConditionalGeneration(PaliGemmaConfig()),
        ]
    for model in models:
        prefixes = tuple(p for part in load_family(model.config).parts.values() for p in part)
        assert [n for n, _ in model.named_parameters() if not n.startswith(prefixes)] == []
