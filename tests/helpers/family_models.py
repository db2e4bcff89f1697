"""Small random models of each family's real architecture."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import family_processors as processors
import torch
from tiny_models import initialize, text_config
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
SIGLIP = {"vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 28}}
SIGLIP["vision_config"]["vision_use_head"] = False
LLAMA = {"model_type": "llama"}
MISTRAL = {"model_type": "mistral", "sliding_window": None}
COHERE2 = {
    "model_type": "cohere2",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
CLIP = {"vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28}}
PIXTRAL = {
    "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 84},
    "vision_feature_layer": -1,
}
PATCH_GRID = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}
IMAGE = {"image": "<image>"}


def _build(
    model_type: str,
    processor: Callable[[], Any],
    tokens: dict[str, str],
    text: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Build a random model of the type and its processor.

    The configuration has the ids of ``tokens``, under ``NAME_token_id``; ``text`` are settings of
    the language model.
    """
    built = processor()
    tokenizer = built.tokenizer
    language = text_config(
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()
    }
    # Copied, because configurations add defaults to nested settings.
    settings = deepcopy({"text_config": {**language, **(text or {})}, **ids, **config})
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type](**settings))
    initialize(model, tokenizer)
    return model, built


def build_qwen3(
    model_type: str, text: dict[str, Any], **vision: Any
) -> Callable[[], tuple[Any, Any]]:
    marks = {"image": "image_pad", "video": "video_pad"}
    marks |= {"vision_start": "vision_start", "vision_end": "vision_end"}
    return partial(
        _build,
        model_type,
        processors.qwen3,
        {name: f"<|{mark}|>" for name, mark in marks.items()},
        text,
        vision_config={**PATCH_GRID, "num_position_embeddings": 64, **vision},
    )


def _glm(kind: str, processor: Callable[[], Any], **text: Any) -> Callable[[], Any]:
    marks = {"image": "<|image|>", "video": "<|video|>"}
    for what in ("image", "video"):
        marks |= {f"{what}_start": f"<|begin_of_{what}|>", f"{what}_end": f"<|end_of_{what}|>"}
    return partial(
        _build,
        kind,
        processor,
        marks,
        {"head_dim": 16, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}, **text},
        vision_config={**PATCH_GRID, "image_size": 112},
    )


def _model(name: str, *settings: Any, **config: Any) -> Callable[[], tuple[Any, Any]]:
    """Return a builder of the model type that has a processor of its name."""
    return partial(_build, name, getattr(processors, name), *settings, **config)


def _build_fast_vlm() -> tuple[Any, Any]:
    """Build FastVLM with another convolutional tower than that of the package timm."""
    tower = {
        "model_type": "convnext",
        "hidden_size": 32,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "num_stages": 2,
        "patch_size": 8,
    }
    text = {"model_type": "qwen2"}
    model, processor = _build("fast_vlm", processors.fast_vlm, IMAGE, text, vision_config=tower)
    model.model.vision_tower.register_forward_pre_hook(  # the other converts pixels itself
        lambda module, pixels: pixels[0].to(module.dtype)
    )
    return model, processor


def _build_mllama() -> tuple[Any, Any]:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
        "image_size": 28,
        "patch_size": 14,
    }
    text = {"num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 0}
    tokens = {"image": "<|image|>"}
    model, processor = _build("mllama", processors.mllama, tokens, text, vision_config=vision)
    for name, gate in model.named_parameters():
        if name.endswith("_gate"):  # initially 0, which would hide the image
            torch.nn.init.constant_(gate, 1.0)
    return model, processor


def _gemma4(**text: Any) -> Callable[[], tuple[Any, Any]]:
    marks = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "video": "<|video|>"}
    marks |= {"audio": "<|audio|>", "boa": "<|audio>"}
    layers = ["sliding_attention", "full_attention"] * 2

    return _model(
        "gemma4",
        marks,
        {
            "num_hidden_layers": 4,
            "layer_types": layers,
            "sliding_window": 16,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 320,  # at least the tokenizer's
            "final_logit_softcapping": 30.0,
            "rope_parameters": None,
            **text,
        },
        vision_config={
            **VISION,
            "patch_size": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 128,
        },
        audio_config=None,
    )


def _paligemma(kind: str, **text: Any) -> Callable[[], tuple[Any, Any]]:
    language = {"model_type": kind, "head_dim": 8, **text}
    return _model("paligemma", IMAGE, language, projection_dim=32, **SIGLIP)


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_vl_moe": build_qwen3(
        "qwen3_vl_moe",
        {**MOE, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        deepstack_visual_indexes=[0, 1],
    ),
    "qwen3_5": build_qwen3("qwen3_5", GATED_DELTA),
    "qwen3_5_moe": build_qwen3("qwen3_5_moe", {**GATED_DELTA, **MOE}),
    "glm4v": _glm("glm4v", processors.glm4v),
    "glm46v": _glm("glm46v", processors.glm46v, model_type="glm4v_text"),
    "glm4v_moe": _glm(
        "glm4v_moe",
        processors.glm4v,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "glm_ocr": _glm("glm_ocr", processors.glm46v),
    "paddleocr_vl": _model(
        "paddleocr_vl",
        {
            "image": "<|IMAGE_PLACEHOLDER|>",
            "video": "<|video_pad|>",
            "vision_start": "<|vision_start|>",
            "vision_end": "<|vision_end|>",
        },
        {"rope_parameters": MROPE, "head_dim": 8},
        vision_config={**VISION, "image_size": 56},
    ),
    "internvl": _model(
        "internvl",
        {"image": "<IMG_CONTEXT>"},
        {"model_type": "qwen2"},
        vision_config={**VISION, "image_size": 28},
        image_seq_length=1,
    ),
    "idefics3": _model("idefics3", IMAGE, LLAMA, vision_config={**VISION, "image_size": 28}),
    "smolvlm": _model("smolvlm", IMAGE, LLAMA, vision_config={**VISION, "image_size": 28}),
    "llava": _model("llava", IMAGE, LLAMA, image_seq_length=4, **CLIP),
    "fast_vlm": _build_fast_vlm,
    "llava_next": _model(
        "llava_next",
        IMAGE,
        MISTRAL,
        image_grid_pinpoints=processors.TILES,
        image_seq_length=4,
        **CLIP,
    ),
    "llava_onevision": _model(
        "llava_onevision",
        {"image": "<image>", "video": "<video>"},
        {"model_type": "qwen2"},
        image_grid_pinpoints=processors.TILES,
        vision_feature_layer=-1,
        **SIGLIP,
    ),
    "pixtral": partial(
        _build,
        "llava",
        processors.pixtral,
        {"image": "[IMG]"},
        MISTRAL,
        vision_feature_select_strategy="full",
        **PIXTRAL,
    ),
    "mistral3": _model("mistral3", {"image": "[IMG]"}, MISTRAL, spatial_merge_size=2, **PIXTRAL),
    "gemma3": _model(
        "gemma3",
        {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"},
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 16,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "rope_parameters": None,
        },
        mm_tokens_per_image=4,
        **SIGLIP,
    ),
    "gemma4": _gemma4(
        use_bidirectional_attention="vision",
        hidden_size_per_layer_input=8,
        head_dim=8,
        global_head_dim=16,
    ),
    "gemma4_causal": _gemma4(hidden_size_per_layer_input=8, head_dim=8, global_head_dim=16),
    "gemma4_moe": _gemma4(
        use_bidirectional_attention="vision",
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        head_dim=8,
        global_head_dim=16,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "paligemma": _paligemma("gemma"),
    "paligemma2": _paligemma("gemma2", sliding_window=16),
    "lfm2_vl": _model(
        "lfm2_vl",
        IMAGE,
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "model_type": "lfm2",
        },
        vision_config={
            **VISION,
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
            "vision_use_head": False,
        },
        projector_hidden_size=32,
    ),
    "mllama": _build_mllama,
    "ovis2": _model(
        "ovis2",
        {"image": "<IMG_ATOM>"},
        {"model_type": "qwen2"},
        vision_config={**VISION, "image_size": 28, "vocab_size": 64},
        hidden_size=32,
    ),
    "cohere2_vision": _model(
        "cohere2_vision",
        {"image": "<|IMG_PATCH|>"},
        COHERE2,
        alignment_intermediate_size=48,
        **SIGLIP,
    ),
    "aya_vision": _model("aya_vision", {"image": "<|IMG_PATCH|>"}, COHERE2, **SIGLIP),
}
"""Builders of a model and its processor, by names of families."""
