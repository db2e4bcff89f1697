"""InternVL 2.5, 3 and 3.5."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class InternVL(Family):
    model_types = ("internvl",)
    frame = "internvl"
    frame_source = "https://github.com/OpenGVLab/InternVL (evaluate_grounding.py)"
    answer_tokens = r"</?(ref|box|quad)>"
