"""The shape of a model, read from its configuration."""

import math
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from vlm_grpo.config.optim import OptimizerName
from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.dist.optimizer import count_state
from vlm_grpo.errors import UserError
from vlm_grpo.model.adapters import apply_lora_or_freeze, find_adapted
from vlm_grpo.model.engine.forwards import is_fused, use_fused_layers
from vlm_grpo.model.families.family import find_part
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.loading import build_empty, find_quantized
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.planning.sizes import ModelShape, Precision, TextShape, VisionShape


def read_model_shape(config: Any, policy: PolicySettings) -> ModelShape:
    """Return the shape of a configuration's model, which is built on the meta device, so that all
    counts are exact."""
    family = load_family(config)
    shares_prompts = policy.engine != "repeated" and why_not_shared(family, config) is None
    try:
        text = _read_text_shape(config.get_text_config())
        vision = _read_vision_shape(config.vision_config)
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"the configuration of the model type {config.model_type!r} lacks a size that a plan "
            f"needs: {error}"
        ) from error
    # accelerate's init_empty_weights would untie tied weights and count them twice.
    with torch.device("meta"):
        model = build_empty(config, policy.trust_remote_code)
        weights = sum(weight.numel() for weight in model.parameters())
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        quantized = [model.get_submodule(n).weight.shape for n in find_quantized(model, policy)]
        apply_lora_or_freeze(model, policy)
    use_fused_layers(model)
    fused = [name for name, module in model.named_modules() if is_fused(module)]
    trained = [(n, w) for n, w in model.named_parameters() if w.requires_grad]
    adapted = find_adapted(model)
    precision: Precision = "float32"
    if policy.dtype == "bfloat16":
        has_masters = policy.lora is None and policy.master_weights == "float32"
        precision = "autocast" if has_masters else "bfloat16"
    shape = ModelShape(
        name=f"{config.model_type}, {weights:,} weights",
        text=replace(text, fuses_norms=any(find_part(name) == "language" for name in fused)),
        vision=vision,
        num_weights=weights,
        num_trained=sum(weight.numel() for _, weight in trained),
        num_linear=linear,
        num_adapted=sum(layer.get_base_layer().weight.numel() for layer in adapted),
        shares_prompts=shares_prompts,
        lora_rank=policy.lora.r if policy.lora is not None else 0,
        trains_vision=any(find_part(name) in ("vision", "projector") for name, _ in trained),
        head_frozen=not model.get_output_embeddings().weight.requires_grad,
        precision=precision,
        quantized_weights=sum(map(math.prod, quantized)),
        quantized_bytes=sum(_count_quantized(rows, columns, policy) for rows, columns in quantized),
        largest_quantized=max(map(math.prod, quantized), default=0),
        has_norms=policy.lora is not None and policy.lora.use_dora,
    )
    dtype = torch.bfloat16 if shape.trained_bytes == 2 else torch.float32
    state_bytes = {
        name: sum(count_state(n, w.shape, name, dtype) for n, w in trained)
        for name in get_args(OptimizerName)
    }
    return replace(shape, state_bytes=state_bytes)


def _count_quantized(rows: int, columns: int, policy: PolicySettings) -> int:
    """Count the bytes of a matrix in 4 or 8 bits, with its scales (``model/loading.py``)."""
    weights = rows * columns
    if policy.load_in == "8bit":
        return weights + 4 * rows
    blocks = -(-weights // 64)
    # Doubly quantized, 256 scales have 8 bits each and share a scale themselves.
    scales = blocks + 4 * -(-blocks // 256) if policy.double_quant else 4 * blocks
    return -(-weights // 2) + scales


def _read_text_shape(config: Any) -> TextShape:
    intermediate = intermediate_total = config.intermediate_size
    if (used := getattr(config, "num_experts_per_tok", None)) is not None:
        experts = getattr(config, "num_experts", None) or config.n_routed_experts
        intermediate = used * config.moe_intermediate_size
        intermediate_total = experts * config.moe_intermediate_size
    elif (used := getattr(config, "top_k_experts", None)) is not None:  # beside a dense MLP
        intermediate += used * config.moe_intermediate_size
        intermediate_total += config.num_experts * config.moe_intermediate_size
    # Gemma 4's layers differ in the width of their heads: the plan takes the mean.
    layers = [config]
    if getattr(config, "per_layer_attributes", None):
        layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    widths = [
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    ]
    keys = sum(w * layer.num_key_value_heads for w, layer in zip(widths, layers, strict=True))
    return TextShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=intermediate,
        intermediate_total=intermediate_total,
        heads=config.num_attention_heads,
        key_heads=layers[0].num_key_value_heads,
        query=config.num_attention_heads * sum(widths) // len(layers),
        key=keys // len(layers),
        vocabulary=config.vocab_size,
        qk_norm=config.model_type.startswith(("qwen3", "gemma3")),
    )


def _read_vision_shape(config: Any) -> VisionShape:
    hidden = getattr(config, "embed_dim", None) or config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or int(hidden * config.mlp_ratio)
    full_attention = getattr(config, "fullatt_block_indexes", None)
    gated = full_attention is not None
    names = ("in_channels", "in_chans", "num_channels")
    channels = next((getattr(config, name) for name in names if hasattr(config, name)), 3)
    edge = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    layers = getattr(config, "depth", None) or config.num_hidden_layers
    return VisionShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=getattr(config, "num_heads", None) or config.num_attention_heads,
        gated=gated,
        activation=getattr(config, "hidden_act", None) or "gelu_pytorch_tanh",
        window=(config.window_size // config.patch_size) ** 2 if gated else None,
        full_attention_layers=len(full_attention) if gated else layers,
        patch_values=channels * getattr(config, "temporal_patch_size", 1) * edge**2,
        merge=getattr(config, "spatial_merge_size", 1) ** 2,
    )
