"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class Glm(Family):
    """GLM's vision models, which mark a final answer of any kind with two special tokens."""

    model_types = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
    frame = "glm"
    frame_source = "https://github.com/zai-org/GLM-V (README.md, Grounding)"
    answer_tokens = r"<\|(begin|end)_of_box\|>"
