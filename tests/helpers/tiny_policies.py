"""Tiny policies of every family, with a prompt and a batch, to count memory and FLOPs of."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import make_prompt, noise_example, tiny_model

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import build_sampling_distribution
from vlm_grpo.model.families import load_family
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Prompt

POLICIES: dict[str, dict[str, Any]] = {
    "lora-float32": {"dtype": "float32", "lora": {"r": 4, "alpha": 8}},
    "lora-bfloat16": {"dtype": "bfloat16", "lora": {"r": 4, "alpha": 8}},
    "full-float32": {"dtype": "float32"},
    "full-bfloat16": {"dtype": "bfloat16"},
    "full-no-masters": {"dtype": "bfloat16", "master_weights": "bfloat16"},
}


def build_policy(
    family: str, values: dict[str, Any], **depths: int
) -> tuple[Policy, PolicySettings]:
    """Build a tiny policy as ``load_model`` does, with the given numbers of layers."""
    settings = PolicySettings.model_validate(values)
    dtype = torch.bfloat16 if values.get("lora") and values["dtype"] == "bfloat16" else None
    if settings.master_weights == "bfloat16":
        dtype = torch.bfloat16
    model, processor = tiny_model(family, dtype or torch.float32)
    language, vision = model.model.language_model, model.model.visual
    if "text" in depths:
        language.layers = language.layers[: depths["text"]]
        model.config.text_config.num_hidden_layers = depths["text"]
    if "vision" in depths:
        vision.blocks = vision.blocks[: depths["vision"]]
        model.config.vision_config.depth = depths["vision"]
        if hasattr(vision, "fullatt_block_indexes"):
            vision.fullatt_block_indexes = [0]
            model.config.vision_config.fullatt_block_indexes = [0]
    model_family = load_family(model.config)
    adapters = apply_lora_or_freeze(model, settings)
    use_shared_attention(model_family, model)
    budget = model_family.pixel_budget(processor)
    autocast = dtype is None and values["dtype"] == "bfloat16"
    loaded = LoadedModel(model, processor, model_family, budget, True, adapters, autocast)
    rollout = load_settings("counting").rollout
    distribution = build_sampling_distribution(model, processor, model_family, rollout)
    return Policy(loaded, distribution), settings


def build_prompt(policy: Policy, side: int = 112) -> Prompt:
    return make_prompt(policy, noise_example("a", [(side, side)]))


def build_batch(prompt: Prompt, group: int = 3, length: int = 5) -> MicroBatch:
    completion = tuple(range(70, 70 + length))
    return MicroBatch((GroupSlice(prompt, (completion,) * group, tuple(range(group))),))
