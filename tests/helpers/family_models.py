"""Small random models of each family's real architecture."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from family_processors import MINICPM, TILES, TILES_56, build_processor
from tiny_models import ROPE, initialize, text_config
from transformers.models.gemma3n import modeling_gemma3n

VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 14,
}  # fmt: skip
SMALL = VISION | {
    "image_size": 28, "depth": 2, "num_heads": 2, "num_key_value_heads": 2, "out_hidden_size": 32,
    "vision_use_head": False,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
"""Sizes of small models. A configuration gets those that it has a field for."""
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
INTERLEAVED = {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
WINDOWS = {"sliding_window": 16, "rope_parameters": None, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention"]
GEMMA3 = {**WINDOWS, "layer_types": MIXED[:1] * 3 + MIXED[1:], "query_pre_attn_scalar": 8}
DYNAMIC = {**ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
ERNIE = {
    "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16],
    "moe_num_shared_experts": 1, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
}  # fmt: skip
ALTERNATING = {**WINDOWS, "layer_types": MIXED * 2}
PATCHES = {"patch_size": 16, "num_position_embeddings": 64}
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model"}}
CLIP = {"vision_config": {"model_type": "clip_vision_model"}}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16, "image_size": 84}
IN_PIXTRAL: Any = {"vision_config": PIXTRAL, "vision_feature_layer": -1}
LINE_BREAK = "Ċ"  # how byte-level tokenizers write it
LLAMA, QWEN2 = {"model_type": "llama"}, {"model_type": "qwen2"}
MISTRAL = {"model_type": "mistral", "sliding_window": None}
COHERE2 = {"model_type": "cohere2", "layer_types": MIXED, "sliding_window": 16}
CONVNEXT = {
    "model_type": "convnext", "hidden_size": 32, "hidden_sizes": [16, 32], "depths": [1, 1],
    "num_stages": 2, "patch_size": 8,
}  # fmt: skip


def _find_tokens(model_type: str, processor: Any, given: dict[str, str]) -> dict[str, int]:
    """Return the ids of special tokens that a configuration has. If not ``given`` by name, they are
    attributes of the processor or its tokenizer, or have the name as their text."""
    default, tokenizer = hf.CONFIG_MAPPING[model_type](), processor.tokenizer
    keys = {key for key in (*default.to_dict(), *default.attribute_map) if key.endswith("token_id")}
    found = {name if name.endswith("_id") else f"{name}_token_id": x for name, x in given.items()}
    keys -= {key for key, other in default.attribute_map.items() if other in found}
    for key in keys - {*found, "bos_token_id", "eos_token_id", "pad_token_id"}:
        name = key.removesuffix("_id")
        texts = [getattr(part, name, None) for part in (processor, tokenizer)]
        texts.append(f"<|{name.removesuffix('_token')}|>")
        known = [text for text in texts if text in tokenizer.get_vocab()]
        found |= {key: known[0]} if known else {}
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in found.items()}


def _shrink(default: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return the small sizes that a configuration has, and its own settings."""
    if "model_type" in own:
        default = hf.CONFIG_MAPPING[own["model_type"]]()
    names = SMALL.keys() & {*default.to_dict(), *default.attribute_map}
    return {name: SMALL[name] for name in names} | own


def _build(
    model_type: str,
    processor: str,
    text: dict[str, Any] | None = None,
    tokens: dict[str, str] | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Build a random model of the type with settings of its language model, and its processor.
    ``tokens`` are those that ``_find_tokens`` does not find, by their name before ``_token_id``."""
    kind: Any = hf.CONFIG_MAPPING[model_type]
    built, default, text = build_processor(processor), kind(), text or {}
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size")}
    language = text_config(built.tokenizer, **sizes, rope_parameters=ROPE)
    if "layer_types" in text:
        text = {"num_hidden_layers": len(text["layer_types"]), **text}
    config["text_config"] = _shrink(default.get_text_config(), text) | language | text
    for name in {"vision_config", "adapter_config"} & {"vision_config", *config}:
        config[name] = _shrink(getattr(default, name), config.get(name, {}))
    ids = _find_tokens(model_type, built, tokens or {})
    # Copied, because configurations add defaults to nested settings.
    model = hf.AutoModelForImageTextToText.from_config(kind(**deepcopy({**ids, **config})))
    initialize(model, built.tokenizer)
    return model, built


def build_qwen3(kind: str, text: dict[str, Any], **vision: Any) -> Callable[[], tuple[Any, Any]]:
    return partial(_build, kind, "qwen3", text, vision_config={**PATCHES, **vision})


def _glm(kind: str, processor: str, **text: Any) -> Callable[[], Any]:
    language = {"head_dim": 16, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}, **text}
    marks = {"image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>"}
    marks |= {"video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"}
    return partial(_build, kind, processor, language, marks, vision_config={"image_size": 112})


def _model(name: str, *settings: Any, **config: Any) -> Callable[[], tuple[Any, Any]]:
    """Return a builder of the model type that has a processor of its name."""
    return partial(_build, name, name, *settings, **config)


def _build_fast_vlm() -> tuple[Any, Any]:
    """Build FastVLM with another convolutional tower than that of the package timm."""
    model, processor = _build("fast_vlm", "fast_vlm", QWEN2, vision_config=CONVNEXT)
    model.model.vision_tower.register_forward_pre_hook(  # the other converts pixels itself
        lambda module, pixels: pixels[0].to(module.dtype)
    )
    return model, processor


def _build_mllama() -> tuple[Any, Any]:
    vision = {"num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [1]}
    vision["vision_output_dim"] = 64
    text = {"num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 0}
    model, processor = _build("mllama", "mllama", text, vision_config=vision)
    for name, gate in model.named_parameters():
        if name.endswith("_gate"):  # initially 0, which would hide the image
            torch.nn.init.constant_(gate, 1.0)
    return model, processor


def _gemma4(**own: Any) -> Callable[[], tuple[Any, Any]]:
    text = ALTERNATING | {
        "num_kv_shared_layers": 2, "global_head_dim": 16,
        "vocab_size_per_layer_input": 320,  # at least the tokenizer's
        "hidden_size_per_layer_input": 8, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    vision = {"model_type": "gemma4_vision", "patch_size": 4, "head_dim": 16}
    vision |= {"pooling_kernel_size": 2, "position_embedding_size": 128}
    return _model("gemma4", text | own, vision_config=vision, audio_config=None)


def _paligemma(kind: str, **text: Any) -> Callable[[], tuple[Any, Any]]:
    language = {"model_type": kind, "head_dim": 8, **text}
    return _model("paligemma", language, projection_dim=32, **SIGLIP)


def _build_gemma3n() -> tuple[Any, Any]:
    """Build Gemma 3n with another convolutional tower than that of the package timm."""
    vision = {"vocab_size": 4, "vocab_offset": 1000, "rms_norm_eps": 1e-6, "hidden_size": 32}
    audio = {
        "vocab_size": 4, "vocab_offset": 1004, "hidden_size": 16, "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [4, 4],
    }  # fmt: skip
    text = ALTERNATING | {
        "num_kv_shared_layers": 2, "laurel_rank": 4,
        "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    }  # fmt: skip
    towers: Any = vars(modeling_gemma3n)["AutoModel"]
    build = towers.from_config

    def build_tower(config: Any) -> Any:
        is_vision = config.model_type == "gemma3n_vision"
        return build(hf.ConvNextConfig(**CONVNEXT) if is_vision else config)

    own: Any = {"vision_config": vision, "vision_soft_tokens_per_image": 4, "audio_config": audio}
    with patch.object(towers, "from_config", build_tower):
        return _build("gemma3n", "gemma3n", text, **own)


VISION_MARKS = {f"vision_{edge}": f"<|vision_{edge}|>" for edge in ("start", "end")}
MOLMO2 = ("image_patch_id", "image_start", "low_res_image_start", "image_end")
MOLMO2 += ("frame_start", "frame_end")
GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
AUDIO = {
    "num_mel_bins": 4, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "d_model": 16, "max_source_positions": 16, "output_dim": 32,
}  # fmt: skip
EXPERTS = {
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "enable_moe_block": True, "top_k_experts": 2,
}  # fmt: skip
INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_lowrank": 8,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
SAM = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 96, "window_size": 4, "global_attn_indexes": [], "downsample_channels": [24, 32],
    "patch_size": 8,  # the processor counts 2: the encoder's queries are 12 × 12
}  # fmt: skip
QFORMER = {
    "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
    "cross_attention_frequency": 1, "use_qformer_text_input": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_vl_moe": build_qwen3("qwen3_vl_moe", INTERLEAVED, deepstack_visual_indexes=[0, 1]),
    "qwen3_5": build_qwen3("qwen3_5", GATED_DELTA),
    "qwen3_5_moe": build_qwen3("qwen3_5_moe", GATED_DELTA),
    "qwen4_exp": build_qwen3("qwen4_exp", GATED_DELTA | INDEXED),
    "glm4v": _glm("glm4v", "glm4v"),
    "glm46v": _glm("glm46v", "glm46v", model_type="glm4v_text"),
    "glm4v_moe": _glm("glm4v_moe", "glm4v", first_k_dense_replace=1),
    "glm_ocr": _glm("glm_ocr", "glm46v"),
    "paddleocr_vl": _model(
        "paddleocr_vl", {"rope_parameters": MROPE, "head_dim": 8}, vision_config={"image_size": 56}
    ),
    "internvl": _model("internvl", QWEN2, image_seq_length=1),
    "idefics3": _model("idefics3", LLAMA),
    "smolvlm": _model("smolvlm", LLAMA),
    "llava": _model("llava", LLAMA, image_seq_length=4, **CLIP),
    "fast_vlm": _build_fast_vlm,
    "llava_next": _model(
        "llava_next", MISTRAL, image_grid_pinpoints=TILES, image_seq_length=4, **CLIP
    ),
    "llava_onevision": _model(
        "llava_onevision", QWEN2, image_grid_pinpoints=TILES, vision_feature_layer=-1, **SIGLIP
    ),
    "pixtral": partial(
        _build, "llava", "pixtral", MISTRAL, vision_feature_select_strategy="full", **IN_PIXTRAL
    ),
    "mistral3": _model("mistral3", MISTRAL, spatial_merge_size=2, **IN_PIXTRAL),
    "gemma3": _model(
        "gemma3", GEMMA3, {"image": "<image_soft_token>"}, mm_tokens_per_image=4, **SIGLIP
    ),
    "gemma4": _gemma4(use_bidirectional_attention="vision"),
    "gemma4_causal": _gemma4(),
    "gemma4_moe": _gemma4(use_bidirectional_attention="vision", **EXPERTS),
    "paligemma": _paligemma("gemma"),
    "paligemma2": _paligemma("gemma2", sliding_window=16),
    "lfm2_vl": _model(
        "lfm2_vl",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
        vision_config={"model_type": "siglip2_vision_model", "num_patches": 16},
        projector_hidden_size=32,
    ),
    "mllama": _build_mllama,
    "ovis2": _model(
        "ovis2", QWEN2, {"image": "<IMG_ATOM>"}, vision_config={"vocab_size": 64}, hidden_size=32
    ),
    "cohere2_vision": _model("cohere2_vision", COHERE2, alignment_intermediate_size=48, **SIGLIP),
    "aya_vision": _model("aya_vision", COHERE2, {"image": "<|IMG_PATCH|>"}, **SIGLIP),
    "lfm3_vl": _model(
        "lfm3_vl",
        {**WINDOWS, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
        vision_config={"patch_size": 16, "num_hidden_layers": 4, "num_key_value_heads": 1},
        projector_hidden_size=32,
    ),
    "minicpmv4_6": _model(
        "minicpmv4_6", GATED_DELTA, vision_config={"image_size": 224}, insert_layer_id=0
    ),
    "minicpmv4_7": _model(
        "minicpmv4_7",
        GATED_DELTA,
        {f"{name}_id": mark for name, mark in MINICPM.items()} | {"newline_id": LINE_BREAK},
        vision_config={"image_size": 224},
        insert_layer_id=0,
    ),
    "molmo2": _model(
        "molmo2",
        {"head_dim": 8, "additional_vocab_size": 8},
        {name: f"<{name.removesuffix('_id').replace('image', 'im')}>" for name in MOLMO2},
        vision_config={"head_dim": 16, "image_size": [56, 56]},
        adapter_config={"head_dim": 16, "text_hidden_size": 32, "vision_feature_layer": [1, 0]},
    ),
    "gemma3n": _build_gemma3n,
    "hunyuan_vl": _model(
        "hunyuan_vl",
        {"head_dim": 8, "rope_parameters": DYNAMIC | {"mrope_section": [1] * 4}},
        {"im_start_id": "<img_start>", "im_end_id": "<img_end>"},
        vision_config={"patch_size": 16, "text_hidden_size": 32, "max_image_size": 128},
    ),
    "lighton_ocr": _model(
        "lighton_ocr", {"model_type": "qwen3", "head_dim": 8}, vision_config=PIXTRAL
    ),
    "deepseek_ocr2": _model(
        "deepseek_ocr2",
        {"mlp_layer_types": ["dense", "sparse"]},
        vision_config={"sam_config": SAM, "encoder_config": VISION | {"num_key_value_heads": 2}},
    ),
    "granite4_vision": _model(
        "granite4_vision",
        GRANITE,
        vision_config={**SIGLIP["vision_config"], "hidden_size": 64, "image_size": 56},
        vision_feature_select_strategy="full",
        image_grid_pinpoints=TILES_56,
        image_seq_length=4,
        downsample_rate="1/2",
        deepstack_layer_map=[[1, 0]],
        spatial_target_layers=[1, 1, 1, 1],
        projector_dropout=0.0,
        qformer_config=QFORMER,
    ),
    "granite_docling": _model(
        "granite_docling",
        GRANITE,
        vision_config={"patch_size": 8, "image_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "qwen2_5_omni_thinker": _model(
        "qwen2_5_omni_thinker",
        {"rope_parameters": MROPE},
        VISION_MARKS,
        vision_config={"fullatt_block_indexes": [1]},
        audio_config=AUDIO,
    ),
    "qwen3_omni_moe_thinker": _model(
        "qwen3_omni_moe_thinker",
        INTERLEAVED,
        VISION_MARKS,
        vision_config={**PATCHES, "deepstack_visual_indexes": [0, 1]},
        audio_config=AUDIO | {"downsample_hidden_size": 8},
    ),
    "ernie4_5_vl_moe": _model("ernie4_5_vl_moe", ERNIE),
}
"""Builders of a model and its processor, by names of families."""
ALIKE = ("qwen4_exp", *[*BUILDERS][[*BUILDERS].index("lfm3_vl") :])
"""Families that meet the engine as others do; of the longer checks they run those of what is their
own."""
