"""Small random models of each family's real architecture, and their processors of small images."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from tiny_models import NORMALIZATION, initialize, text_config, tiny_tokenizer
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.smolvlm import processing_smolvlm

from vlm_grpo.data_scripts.tiny_vlm import CHAT_TEMPLATE

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
CONVNEXT = {
    "model_type": "convnext",
    "hidden_size": 32,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "num_stages": 2,
    "patch_size": 8,
}
IMAGE = {"image": "<image>"}


TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]
TILES_56 = [[2 * side for side in sides] for sides in TILES]
SQUARE = {"height": 28, "width": 28}
MOLMO2 = [f"<{n}>" for n in ("im_patch", "im_col", "im_start", "low_res_im_start", "im_end")]
MOLMO2 += ["<frame_start>", "<frame_end>", "<im_low>"]
ERNIE = {
    f"{what}_{part}token": f"<|{what.upper()}_{mark}|>"
    for what in ("image", "video")
    for part, mark in (("", "PLACEHOLDER"), ("start_", "START"), ("end_", "END"))
}
IDEFICS: dict[str, Any] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def _pixels(token_edge: int) -> dict[str, int]:
    """Return a pixel budget of 1 to 16 image tokens."""
    return {"shortest_edge": token_edge**2, "longest_edge": 16 * token_edge**2}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _set(target: Any, **values: Any) -> Any:
    """Return the object with attributes that its constructor does not take."""
    for name, value in values.items():
        setattr(target, name, value)
    return target


def _glm_processor(processor: Any, images: Any, videos: Any) -> Any:
    marks = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    # The budget counts each image as the two frames of a temporal patch.
    size = {"shortest_edge": 2 * 28**2, "longest_edge": 2 * 16 * 28**2}
    return processor(images(size=size), tiny_tokenizer("<|image|>", "<|video|>", *marks), videos())


def _idefics_tokenizer(*more: str) -> Any:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    return tiny_tokenizer(*marks, *tiles, *more)


def _smolvlm() -> Any:
    # The processor is not built without this package, which writes out numbers in video prompts.
    module: Any = processing_smolvlm
    module.num2words = str
    images, tokenizer = hf.SmolVLMImageProcessor(**IDEFICS), _idefics_tokenizer("<video>")
    return hf.SmolVLMProcessor(images, tokenizer, hf.SmolVLMVideoProcessor(), image_seq_len=1)


def _llava(kind: Any, images: Any) -> Any:
    tokenizer, own = tiny_tokenizer("<image>"), {"vision_feature_select_strategy": "default"}
    return kind(images, tokenizer, patch_size=14, num_additional_image_tokens=1, **own)


def _pixtral(merge: int) -> Any:
    images = hf.PixtralImageProcessor(
        size={"longest_edge": 84}, patch_size={"height": 14 * merge, "width": 14 * merge}
    )
    tokenizer = tiny_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    return hf.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=merge)


def _lfm2_vl() -> Any:
    images = hf.Lfm2VlImageProcessor(
        size=SQUARE,
        tile_size=28,
        encoder_patch_size=14,
        min_image_tokens=1,
        max_image_tokens=4,
        max_tiles=4,
    )
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return hf.Lfm2VlProcessor(images, tiny_tokenizer(*marks, *tiles))


def _minicpm(kind: Any) -> Any:
    names = {f"{what}_{edge}_token" for what in ("image", "slice") for edge in ("start", "end")}
    tokens = {n: "<{}{}>".format("/" * ("end" in n), n.partition("_")[0]) for n in sorted(names)}
    tokenizer = tiny_tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
        **tokens,
    )
    images = hf.MiniCPMV4_6ImageProcessor(max_slice_nums=4, scale_resolution=56)
    return kind(images, hf.MiniCPMV4_6VideoProcessor(), tokenizer)


def _omni(edge: int) -> Any:
    """Build the processor of a Qwen-Omni model with image tokens of this side."""
    marks = {f"{what}_token": f"<|{what}_pad|>" for what in ("image", "video", "audio")}
    marks |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    marks |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    kind = hf.Qwen2_5OmniProcessor if edge == 28 else hf.Qwen3OmniMoeProcessor
    images = hf.Qwen2VLImageProcessor(size=_pixels(edge), patch_size=edge // 2)
    videos, audio = hf.Qwen2VLVideoProcessor(), hf.WhisperFeatureExtractor(feature_size=4)
    return kind(images, videos, audio, tiny_tokenizer(**marks))


PROCESSORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "qwen3": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        lambda: hf.Qwen3VLProcessor(
            image_processor=hf.Qwen2VLImageProcessor(size=_pixels(32), patch_size=16),
            tokenizer=tiny_tokenizer(),
            video_processor=hf.Qwen3VLVideoProcessor(**NORMALIZATION),
        ),
    ),
    "glm4v": (
        "<|begin_of_image|><|image|><|end_of_image|>",
        lambda: _glm_processor(hf.Glm4vProcessor, hf.Glm4vImageProcessor, hf.Glm4vVideoProcessor),
    ),
    "glm46v": (
        "<|begin_of_image|><|image|><|end_of_image|>",
        lambda: _glm_processor(
            hf.Glm46VProcessor, hf.Glm46VImageProcessor, hf.Glm46VVideoProcessor
        ),
    ),
    "paddleocr_vl": (
        "<|vision_start|><|IMAGE_PLACEHOLDER|><|vision_end|>",
        lambda: hf.PaddleOCRVLProcessor(
            hf.PaddleOCRVLImageProcessor(size=_pixels(28)),
            tiny_tokenizer(image_token="<|IMAGE_PLACEHOLDER|>", video_token="<|video_pad|>"),
        ),
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        lambda: hf.InternVLProcessor(
            hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
            tiny_tokenizer(
                *("<ref>", "</ref>", "<box>", "</box>"),
                start_image_token="<img>",
                end_image_token="</img>",
                context_image_token="<IMG_CONTEXT>",
                video_token="<video>",
            ),
            hf.InternVLVideoProcessor(),
            image_seq_length=1,
        ),
    ),
    "idefics3": (
        "<image>",
        lambda: hf.Idefics3Processor(
            hf.Idefics3ImageProcessor(**IDEFICS), _idefics_tokenizer(), image_seq_len=1
        ),
    ),
    "smolvlm": ("<image>", _smolvlm),
    "llava": (
        "<image>",
        lambda: _llava(
            hf.LlavaProcessor,
            hf.LlavaImageProcessor(size={"shortest_edge": 28}, crop_size=SQUARE),
        ),
    ),
    "fast_vlm": (
        "<image>",
        lambda: hf.LlavaProcessor(
            hf.CLIPImageProcessor(
                size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
            ),
            tiny_tokenizer("<image>"),
            patch_size=16,
            vision_feature_select_strategy="full",
        ),
    ),
    "llava_next": (
        "<image>",
        lambda: _llava(
            hf.LlavaNextProcessor,
            hf.LlavaNextImageProcessor(
                size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=TILES
            ),
        ),
    ),
    "llava_onevision": (
        "<image>",
        lambda: hf.LlavaOnevisionProcessor(
            hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=TILES),
            tiny_tokenizer("<image>", "<video>"),
            hf.LlavaOnevisionVideoProcessor(),
            num_image_tokens=4,
            vision_feature_select_strategy="full",
        ),
    ),
    "pixtral": ("[IMG]", lambda: _pixtral(1)),
    "mistral3": ("[IMG]", lambda: _pixtral(2)),
    "gemma3": (
        "<start_of_image>",
        lambda: hf.Gemma3Processor(
            hf.Gemma3ImageProcessor(size=SQUARE),
            tiny_tokenizer(
                boi_token="<start_of_image>",
                eoi_token="<end_of_image>",
                image_token="<image_soft_token>",
            ),
            image_seq_length=4,
        ),
    ),
    "gemma4": (
        "<|image|>",
        lambda: hf.Gemma4Processor(
            hf.Gemma4AudioFeatureExtractor(),
            hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
            tiny_tokenizer(
                boi_token="<|image>",
                eoi_token="<image|>",
                image_token="<|image|>",
                boa_token="<|audio>",
                eoa_token="<audio|>",
                audio_token="<|audio|>",
            ),
            hf.Gemma4VideoProcessor(),
        ),
    ),
    "paligemma": (
        "<image>",
        lambda: hf.PaliGemmaProcessor(
            _set(hf.SiglipImageProcessor(size=SQUARE), image_seq_length=4),
            _set(tiny_tokenizer("<bos>"), bos_token="<bos>"),
        ),
    ),
    "mllama": (
        "<|image|>",
        lambda: hf.MllamaProcessor(
            hf.MllamaImageProcessor(size=SQUARE, max_image_tiles=4),
            _set(tiny_tokenizer("<bos>", "<|image|>", "<|python_tag|>"), bos_token="<bos>"),
        ),
    ),
    "lfm2_vl": ("<image>", _lfm2_vl),
    "ovis2": (
        "<image>",
        lambda: hf.Ovis2Processor(
            hf.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4),
            tiny_tokenizer(
                "<image>", *(f"<IMG_{n}>" for n in ("ATOM", "START", "GRID", "COL", "ROW", "END"))
            ),
            image_seq_length=4,
        ),
    ),
    "cohere2_vision": (
        "<|IMG_PATCH|>",
        lambda: hf.Cohere2VisionProcessor(
            # patch_size: the side of a tile in image tokens
            _set(hf.Cohere2VisionImageProcessor(size=SQUARE, max_patches=4), patch_size=1),
            tiny_tokenizer(
                boi_token="<|START_OF_IMG|>",
                eoi_token="<|END_OF_IMG|>",
                image_token="<|IMG_PATCH|>",
                img_line_break_token="<|IMG_LINE_BREAK|>",
            ),
        ),
    ),
    "aya_vision": (
        "<image>",
        lambda: hf.AyaVisionProcessor(
            hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
            tiny_tokenizer(
                *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
                *("<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
            ),
            patch_size=14,
            img_size=28,
            downsample_factor=2,
        ),
    ),
    "lfm3_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        lambda: hf.Lfm3VlProcessor(
            hf.Qwen2VLImageProcessor(size=_pixels(32), patch_size=16),
            tiny_tokenizer(),
            hf.Qwen3VLVideoProcessor(**NORMALIZATION),
        ),
    ),
    "minicpmv4_6": ("<|image_pad|>", lambda: _minicpm(hf.MiniCPMV4_6Processor)),
    "minicpmv4_7": ("<|image_pad|>", lambda: _minicpm(hf.MiniCPMV4_7Processor)),
    "molmo2": (
        "<|image|>",
        lambda: hf.Molmo2Processor(
            hf.Molmo2ImageProcessor(
                size={"height": 56, "width": 56}, max_crops=4, overlap_margins=[1, 1]
            ),
            hf.Molmo2VideoProcessor(),
            tiny_tokenizer(*MOLMO2, "<|image|>", "<|video|>"),
        ),
    ),
    "gemma3n": (
        "<image_soft_token>",
        lambda: hf.Gemma3nProcessor(
            hf.Gemma3nAudioFeatureExtractor(),
            hf.SiglipImageProcessor(size={"height": 32, "width": 32}),
            tiny_tokenizer(
                boi_token="<start_of_image>",
                eoi_token="<end_of_image>",
                image_token="<image_soft_token>",
                boa_token="<start_of_audio>",
                eoa_token="<end_of_audio>",
                audio_token="<audio_soft_token>",
            ),
            image_seq_length=4,
        ),
    ),
    "hunyuan_vl": (
        "<img_start><img><img_end>",
        lambda: hf.HunYuanVLProcessor(
            hf.HunYuanVLImageProcessor(size=_pixels(32)),
            tiny_tokenizer(
                image_token="<img>", image_start_token="<img_start>", image_end_token="<img_end>"
            ),
        ),
    ),
    "lighton_ocr": (
        "<|image_pad|>",
        lambda: hf.LightOnOcrProcessor(
            hf.PixtralImageProcessor(
                size={"longest_edge": 84}, patch_size={"height": 28, "width": 28}
            ),
            tiny_tokenizer(
                image_token="<|image_pad|>",
                image_break_token="<|vision_pad|>",
                image_end_token="<|vision_end|>",
            ),
        ),
    ),
    "deepseek_ocr2": (
        "<image>",
        lambda: hf.DeepseekOcr2Processor(
            hf.DeepseekOcr2ImageProcessor(size=_square(96), tile_size=96, max_patches=2),
            tiny_tokenizer("<image>"),
            patch_size=2,
        ),
    ),
    "granite4_vision": (
        "<image>",
        lambda: hf.Granite4VisionProcessor(
            hf.LlavaNextImageProcessor(
                size={"shortest_edge": 56}, crop_size=_square(56), image_grid_pinpoints=TILES_56
            ),
            tiny_tokenizer("<image>"),
            patch_size=14,
            vision_feature_select_strategy="full",
            downsample_rate="1/2",
        ),
    ),
    "granite_docling": (
        "<image>",
        lambda: hf.GraniteDoclingProcessor(
            hf.GraniteDoclingImageProcessor(size=_square(32), max_patches=4),
            _idefics_tokenizer(),
            image_seq_len=1,
        ),
    ),
    "qwen2_5_omni_thinker": ("<|vision_start|><|image_pad|><|vision_end|>", lambda: _omni(28)),
    "qwen3_omni_moe_thinker": ("<|vision_start|><|image_pad|><|vision_end|>", lambda: _omni(32)),
    "ernie4_5_vl_moe": (
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        lambda: hf.Ernie4_5_VLMoeProcessor(
            hf.Ernie4_5_VLMoeImageProcessor(size=_pixels(28)),
            tiny_tokenizer(**ERNIE),
            hf.Ernie4_5_VLMoeVideoProcessor(draw_on_frames=False),
        ),
    ),
}
"""The text of an image in a prompt, and a function that builds a processor of small images."""


def build_processor(name: str) -> Any:
    """Build a processor with a tokenizer of one token per byte, and Qwen's form of a chat."""
    image, build = PROCESSORS[name]
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image)
    return _set(build(), chat_template=template)


def _build(
    model_type: str,
    processor: str,
    tokens: dict[str, str],
    text: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Build a random model of the type and its processor.

    The configuration has the ids of ``tokens``, under ``NAME_token_id`` or a name that ends with
    ``_id``; ``text`` are settings of the language model.
    """
    built = build_processor(processor)
    tokenizer = built.tokenizer
    language = text_config(
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    ids = {
        name if name.endswith("_id") else f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in tokens.items()
    }
    # Copied, because configurations add defaults to nested settings.
    settings = deepcopy({"text_config": {**language, **(text or {})}, **ids, **config})
    model = hf.AutoModelForImageTextToText.from_config(hf.CONFIG_MAPPING[model_type](**settings))
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
        "qwen3",
        {name: f"<|{mark}|>" for name, mark in marks.items()},
        text,
        vision_config={**PATCH_GRID, "num_position_embeddings": 64, **vision},
    )


def _glm(kind: str, processor: str, **text: Any) -> Callable[[], Any]:
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
    return partial(_build, name, name, *settings, **config)


def _build_fast_vlm() -> tuple[Any, Any]:
    """Build FastVLM with another convolutional tower than that of the package timm."""
    text = {"model_type": "qwen2"}
    model, processor = _build("fast_vlm", "fast_vlm", IMAGE, text, vision_config=CONVNEXT)
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
    model, processor = _build("mllama", "mllama", tokens, text, vision_config=vision)
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


def _build_gemma3n() -> tuple[Any, Any]:
    """Build Gemma 3n with another convolutional tower than that of the package timm."""
    vocabulary = {"vocab_size": 4, "vocab_offset": 1000, "rms_norm_eps": 1e-6}
    audio = {
        "vocab_size": 4,
        "vocab_offset": 1004,
        "hidden_size": 16,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [4, 4],
    }
    marks = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    marks |= {"audio": "<audio_soft_token>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
    text = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "rope_parameters": None,
    }
    towers: Any = vars(modeling_gemma3n)["AutoModel"]
    build = towers.from_config

    def build_tower(config: Any) -> Any:
        return build(
            hf.ConvNextConfig(**CONVNEXT) if config.model_type == "gemma3n_vision" else config
        )

    with patch.object(towers, "from_config", build_tower):
        return _model(
            "gemma3n",
            marks,
            text,
            vision_config=vocabulary | {"hidden_size": 32},
            vision_soft_tokens_per_image=4,
            audio_config=audio,
        )()


QWEN = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
SIDES = {"num_key_value_heads": 2, "head_dim": 16}
GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
AUDIO = {
    "num_mel_bins": 4,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "max_source_positions": 16,
    "output_dim": 32,
}
BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_vl_moe": build_qwen3(
        "qwen3_vl_moe",
        {**MOE, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        deepstack_visual_indexes=[0, 1],
    ),
    "qwen3_5": build_qwen3("qwen3_5", GATED_DELTA),
    "qwen3_5_moe": build_qwen3("qwen3_5_moe", {**GATED_DELTA, **MOE}),
    "qwen4_exp": build_qwen3(
        "qwen4_exp",
        {
            **GATED_DELTA,
            **MOE,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    "glm4v": _glm("glm4v", "glm4v"),
    "glm46v": _glm("glm46v", "glm46v", model_type="glm4v_text"),
    "glm4v_moe": _glm(
        "glm4v_moe",
        "glm4v",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "glm_ocr": _glm("glm_ocr", "glm46v"),
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
        image_grid_pinpoints=TILES,
        image_seq_length=4,
        **CLIP,
    ),
    "llava_onevision": _model(
        "llava_onevision",
        {"image": "<image>", "video": "<video>"},
        {"model_type": "qwen2"},
        image_grid_pinpoints=TILES,
        vision_feature_layer=-1,
        **SIGLIP,
    ),
    "pixtral": partial(
        _build,
        "llava",
        "pixtral",
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
    "lfm3_vl": _model(
        "lfm3_vl",
        QWEN,
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": 16,
            "head_dim": 8,
            "rope_parameters": None,
        },
        vision_config={
            **VISION,
            "patch_size": 16,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
        },
        projector_hidden_size=32,
    ),
    "minicpmv4_6": _model(
        "minicpmv4_6",
        {"image": "<|image_pad|>", "video": "<|video_pad|>"},
        GATED_DELTA,
        vision_config=VISION,
        insert_layer_id=0,
    ),
    "minicpmv4_7": _model(
        "minicpmv4_7",
        {
            "image": "<|image_pad|>",
            "video": "<|video_pad|>",
            "image_start_id": "<image>",
            "image_end_id": "</image>",
            "slice_start_id": "<slice>",
            "slice_end_id": "</slice>",
            "newline_id": "Ċ",  # how byte-level tokenizers write a line break
        },
        GATED_DELTA,
        vision_config=VISION,
        insert_layer_id=0,
    ),
    "molmo2": _model(
        "molmo2",
        {
            "image_patch_id": "<im_patch>",
            "image_start": "<im_start>",
            "low_res_image_start": "<low_res_im_start>",
            "image_end": "<im_end>",
            "frame_start": "<frame_start>",
            "frame_end": "<frame_end>",
        },
        {"head_dim": 8, "additional_vocab_size": 8},
        vision_config={**VISION, **SIDES, "image_size": [56, 56]},
        adapter_config={
            **SIDES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "text_hidden_size": 32,
            "vision_feature_layer": [1, 0],
        },
    ),
    "gemma3n": _build_gemma3n,
    "hunyuan_vl": _model(
        "hunyuan_vl",
        {"image": "<img>", "im_start_id": "<img_start>", "im_end_id": "<img_end>"},
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 1000.0,
                "mrope_section": [1, 1, 1, 1],
            },
        },
        vision_config={
            **VISION,
            "patch_size": 16,
            "num_key_value_heads": 2,
            "out_hidden_size": 32,
            "text_hidden_size": 32,
            "max_image_size": 128,
        },
    ),
    "lighton_ocr": _model(
        "lighton_ocr",
        {"image": "<|image_pad|>"},
        {"model_type": "qwen3", "head_dim": 8},
        vision_config={**PIXTRAL["vision_config"]},
    ),
    "deepseek_ocr2": _model(
        "deepseek_ocr2",
        IMAGE,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision_config={
            "sam_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 96,
                "patch_size": 8,  # the processor counts 2: the encoder's queries are 12 × 12
                "window_size": 4,
                "global_attn_indexes": [],
                "downsample_channels": [24, 32],
            },
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
    ),
    "granite4_vision": _model(
        "granite4_vision",
        IMAGE,
        GRANITE,
        vision_config={**SIGLIP["vision_config"], "hidden_size": 64, "image_size": 56},
        vision_feature_select_strategy="full",
        image_grid_pinpoints=TILES_56,
        image_seq_length=4,
        downsample_rate="1/2",
        deepstack_layer_map=[[1, 0]],
        spatial_target_layers=[1, 1, 1, 1],
        projector_dropout=0.0,
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "granite_docling": _model(
        "granite_docling",
        IMAGE,
        GRANITE,
        vision_config={
            **VISION,
            "patch_size": 8,
            "image_size": 32,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    ),
    "qwen2_5_omni_thinker": _model(
        "qwen2_5_omni_thinker",
        QWEN | {"audio": "<|audio_pad|>"},
        {"rope_parameters": MROPE},
        vision_config={**PATCH_GRID, "fullatt_block_indexes": [1]},
        audio_config=AUDIO,
    ),
    "qwen3_omni_moe_thinker": _model(
        "qwen3_omni_moe_thinker",
        QWEN | {"audio": "<|audio_pad|>", "audio_start": "<|audio_start|>"},
        {**MOE, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision_config={
            **PATCH_GRID,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        audio_config=AUDIO | {"downsample_hidden_size": 8},
    ),
    "ernie4_5_vl_moe": _model(
        "ernie4_5_vl_moe",
        {name.removesuffix("_token"): token for name, token in ERNIE.items()},
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [16, 16],
            "moe_num_shared_experts": 1,
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
        },
    ),
}
"""Builders of a model and its processor, by names of families."""
ALIKE = ("qwen4_exp", *[*BUILDERS][[*BUILDERS].index("lfm3_vl") :])
"""Families that meet the engine as others do; of the longer checks they run those of what is their
own."""
