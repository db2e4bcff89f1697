"""The architecture of the embedded tiny VLM: a small Qwen2.5-VL, its tokenizer and its processor.

They are instances of the classes that a Qwen2.5-VL from the hub uses, so that code that runs on
this model runs on the large ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

CARD = """# tiny-vlm

A Qwen2.5-VL of {parameters:,} parameters for tests and first runs, made from random weights by
`python -m vlm_grpo.data_scripts.make_tiny_vlm`. It solves three tasks on synthetic images (84×84
shapes, 84×28 words) with an accuracy of about one half, which leaves room for reinforcement
learning, and nothing else. It contains no other model's weights, images or texts.

| task | greedy | sampled, temperature 1 |
| --- | --- | --- |
{rows}

Counting and OCR: exact match; grounding: IoU of at least 0.5; {n} held-out examples each.
Settings, seeds and all figures: `warmup.json`. License: Apache-2.0, as the package.
"""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's names; <|endoftext|> is the padding token and <|im_end|> ends an answer."""

PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenization pattern; every digit is a separate token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's chat format, without its default system message."""


def build_processor(texts: Iterable[str], vocabulary: int = 480) -> Qwen2_5_VLProcessor:
    """Build a processor whose byte-level BPE is trained on prompts and answers in its format.

    The vocabulary has the 256 bytes, the special tokens and the merges.
    """
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learned.decoder = decoders.ByteLevel()
    texts = list(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS),
        # A merge must occur in many texts, so that random words stay single letters.
        min_frequency=max(2, len(texts) // 50),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(texts, trainer)
    state = json.loads(learned.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"],
        merges=[tuple(merge) for merge in state["merges"]],  # pyright: ignore[reportArgumentType]
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=4096,
        padding_side="left",
    )
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}  # 1 to 64 image tokens
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Build a Qwen2.5-VL of about 1.2 million parameters with random weights.

    Matrices are initialized with std = 1 / sqrt(fan_in). With the library's 0.02, which suits wide
    models, this narrow one does not learn to use the image within a thousand steps.
    """
    tokenizer = processor.tokenizer
    token = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": token["<|im_end|>"],
            "pad_token_id": token["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [2],
        },
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=token["<|im_end|>"], pad_token_id=token["<|endoftext|>"]
    )
    return model


def render_model_card(report: Mapping[str, Any]) -> str:
    """Return the README of the model folder."""
    first = report["tests"][0]
    rows = "\n".join(
        f"| {name} | {first['greedy'][name]:.0%} | {first['sampled'][name]:.0%} |"
        for name in first["greedy"]
    )
    return CARD.format(rows=rows, n=first["examples_per_task"], **report)
