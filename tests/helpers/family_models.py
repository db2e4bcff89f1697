"""Small random models of families without a shared-prefix form, and their processors."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import initialize, text_config, tiny_tokenizer
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from vlm_grpo.engine.sampling import SamplingDistribution
from vlm_grpo.families import load_family
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]


def _chat_template(image: str) -> str:
    return (
        "{% for message in messages %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{% endfor %}<|im_end|>{% endfor %}"
    )


def _text(kind: str, tokenizer: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {"model_type": kind, **text_config(tokenizer, rope_parameters=rope)}


def _build_idefics3() -> tuple[Any, Any]:
    tokenizer: Any = tiny_tokenizer(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
    )
    processor = Idefics3Processor(
        Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        tokenizer,
        image_seq_len=1,
        chat_template=_chat_template("<image>"),
    )
    config = Idefics3Config(
        text_config=_text("llama", tokenizer),
        vision_config={**VISION, "image_size": 28},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return Idefics3ForConditionalGeneration(config), processor


def _build_llava_onevision() -> tuple[Any, Any]:
    tokenizer: Any = tiny_tokenizer("<image>", "<video>")
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=TILES),
        tokenizer,
        LlavaOnevisionVideoProcessor(),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=_chat_template("<image>"),
    )
    vision = {**VISION, "model_type": "siglip_vision_model", "image_size": 28}
    config = LlavaOnevisionConfig(
        text_config=_text("qwen2", tokenizer),
        vision_config={**vision, "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=TILES,
        vision_feature_layer=-1,
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


def _build_pixtral(merge: int = 1) -> tuple[Any, Any]:
    tokenizer: Any = tiny_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    patch = {"height": 14, "width": 14}
    processor = PixtralProcessor(
        PixtralImageProcessor(size={"longest_edge": 84}, patch_size=patch),
        tokenizer,
        patch_size=14,
        spatial_merge_size=merge,
        chat_template=_chat_template("[IMG]"),
    )
    common: dict[str, Any] = {
        "text_config": _text("mistral", tokenizer),
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 84},
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "vision_feature_layer": -1,
    }
    if merge > 1:
        config = Mistral3Config(spatial_merge_size=merge, **common)
        return Mistral3ForConditionalGeneration(config), processor
    config = LlavaConfig(vision_feature_select_strategy="full", **common)
    return LlavaForConditionalGeneration(config), processor


BUILDERS = {
    "idefics3": _build_idefics3,
    "llava_onevision": _build_llava_onevision,
    "mistral3": lambda: _build_pixtral(merge=2),
    "pixtral": _build_pixtral,
}


def build_family_policy(name: str) -> Policy:
    """Build a policy of the named family with random weights, in the repeated form."""
    torch.manual_seed(0)
    model, processor = BUILDERS[name]()
    initialize(model, processor.tokenizer)
    family = load_family(model.config)
    loaded = LoadedModel(model, processor, family, None, shared=False, adapters=None)
    banned = family.banned_token_ids(model.config)
    eos = (model.generation_config.eos_token_id,)
    return Policy(loaded, SamplingDistribution(banned=banned, eos=eos))
