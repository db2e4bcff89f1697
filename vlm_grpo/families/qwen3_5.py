"""Qwen3.5 and the mixtures of experts of Qwen3-VL."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class Qwen3VLMoe(Family):
    model_types = ("qwen3_vl_moe",)
    frame_source = "https://github.com/QwenLM/Qwen3-VL (cookbooks/2d_grounding.ipynb)"
    answer_tokens = r"<\|(object_ref|box|quad)_(start|end)\|>"


class Qwen35(Qwen3VLMoe):
    """Qwen3.5 and later models of the same type, which write boxes as Qwen3-VL does."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    frame_source = "programs that use the model (its model card was not read)"
