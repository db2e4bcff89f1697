"""The parts of image-text models are found by the names of their modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.families import find_part
from vlm_grpo.model.loading import apply_lora_or_freeze

MODELS = (
    "Gemma3",
    "Glm4v",
    "Idefics3",
    "InternVL",
    "Llava",
    "LlavaNext",
    "LlavaOnevision",
    "Mistral3",
    "PaliGemma",
    "Qwen3VLMoe",
    "Qwen3_5",
    "SmolVLM",
)


def build_model(name: str) -> Any:
    """Build a model of few layers, without memory for its weights."""
    config = getattr(transformers, f"{name}Config")()
    text, vision = config.get_text_config(), config.vision_config
    for part, key in (
        (text, "num_hidden_layers"),
        (vision, "num_hidden_layers"),
        (vision, "depth"),
    ):
        if hasattr(part, key):
            setattr(part, key, 2)
    if hasattr(text, "layer_types"):
        text.layer_types = text.layer_types[-2:]
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_found_frozen_and_adapted(name: str) -> None:
    model = build_model(name)
    assert {find_part(n) for n, _ in model.named_parameters()} == {
        "vision",
        "projector",
        "language",
    }
    for part in ("vision", "projector", "language"):
        apply_lora_or_freeze(model, PolicySettings(freeze=(part,)))
        frozen = {n for n, weight in model.named_parameters() if not weight.requires_grad}
        assert frozen == {n for n, _ in model.named_parameters() if find_part(n) == part}
        model.requires_grad_(True)

    linear = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {n for n in linear if find_part(n) == "language"} - {"lm_head"}
    apply_lora_or_freeze(model, PolicySettings(lora=LoraSettings(r=2)))
    trained = {n for n, weight in model.named_parameters() if weight.requires_grad}
    assert {n.partition(".lora_")[0] for n in trained} == expected
    assert any(".q_proj" in n for n in expected)
