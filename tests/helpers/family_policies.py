"""Policies of the small random models of every family."""

from __future__ import annotations

from typing import Any

import torch
from family_models import BUILDERS

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.engine.activations import enable_gradient_checkpointing
from vlm_grpo.engine.attention import use_shared_attention
from vlm_grpo.engine.sampling import SamplingDistribution
from vlm_grpo.families import load_family
from vlm_grpo.model.loading import LoadedModel, apply_lora_or_freeze
from vlm_grpo.model.policy import Policy


def build_family_policy(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = False,
    policy: Any = None,
    **distribution: Any,
) -> Policy:
    """Build a policy of the named family with random weights.

    Args:
        name: name of the family.
        dtype: precision of the weights.
        shared: whether completions share their prompt.
        policy: policy settings, by which the model is trained; None: it is not.
        distribution: arguments of ``SamplingDistribution``.
    """
    torch.manual_seed(0)
    model, processor = BUILDERS[name]()
    model.to(dtype)
    if dtype == torch.float64:  # which the default computation of experts refuses
        model.set_experts_implementation("eager")
    family, adapters = load_family(model.config), None
    if shared:
        assert family.why_not_shared(model.config) is None
        use_shared_attention(family, model)
    if policy is not None:
        settings = PolicySettings.model_validate(policy)
        enable_gradient_checkpointing(model, settings.gradient_checkpointing)
        adapters = apply_lora_or_freeze(model, settings)
        model.train()
    budget = family.pixel_budget(processor)
    loaded = LoadedModel(model, processor, family, budget, shared, adapters)
    defaults = {
        "banned": family.banned_token_ids(model.config, processor),
        "eos": (model.generation_config.eos_token_id,),
    }
    return Policy(loaded, SamplingDistribution(**(defaults | distribution)))
