"""Models of named sizes with random weights, in the public architectures' configurations.

Random weights need no download and do not change speed or memory.
"""

from __future__ import annotations

from typing import Any

import checkout  # noqa: F401
import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen25
from transformers import Qwen3VLForConditionalGeneration as Qwen3

from vlm_grpo.data_scripts.tiny_vlm import SPECIAL_TOKENS, build_processor

_MROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}

_QWEN25_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {**_MROPE, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": True,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
    "12m": {
        "text": {
            "vocab_size": 4096,
            "hidden_size": 320,
            "intermediate_size": 832,
            "num_hidden_layers": 6,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rope_parameters": {**_MROPE, "mrope_section": [8, 12, 12]},
            "tie_word_embeddings": False,
        },
        "vision": {
            "depth": 4,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": 320,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "35m": {
        "text": {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1280,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": {**_MROPE, "mrope_section": [8, 12, 12]},
            "tie_word_embeddings": True,
        },
        "vision": {
            "depth": 6,
            "hidden_size": 320,
            "intermediate_size": 1024,
            "num_heads": 8,
            "out_hidden_size": 512,
            "fullatt_block_indexes": [2, 5],
        },
    },
    "qwen2.5-vl-3b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": _MROPE,
            "tie_word_embeddings": True,
        },
        "vision": {**_QWEN25_VISION, "out_hidden_size": 2048},
    },
    "qwen2.5-vl-7b": {
        "text": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": _MROPE,
            "tie_word_embeddings": False,
        },
        "vision": {**_QWEN25_VISION, "out_hidden_size": 3584},
    },
    "qwen3-vl-4b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {**_MROPE, "mrope_section": [24, 20, 20]},
            "tie_word_embeddings": True,
        },
        "vision": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}


def build_random_model(
    size: str, dtype: torch.dtype, device: str, max_pixels: int
) -> tuple[Any, Any]:
    """Build a random model of a named size in evaluation mode, and its processor."""
    processor = build_processor(["What is in the image?", "0123456789"])
    tokenizer = processor.tokenizer
    token = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    shared = {
        "text_config": {
            **text,
            "max_position_embeddings": 32768,
            "bos_token_id": None,
            "eos_token_id": token["<|im_end|>"],
            "pad_token_id": token["<|endoftext|>"],
        },
        "vision_config": vision,
        "image_token_id": token["<|image_pad|>"],
        "video_token_id": token["<|video_pad|>"],
        "vision_start_token_id": token["<|vision_start|>"],
        "vision_end_token_id": token["<|vision_end|>"],
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    torch.manual_seed(0)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": max_pixels}
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            if size.startswith("qwen3"):
                model: Any = Qwen3(Qwen3VLConfig(**shared))
                processor = Qwen3VLProcessor(
                    Qwen2VLImageProcessor(size=pixels, patch_size=16),
                    tokenizer,
                    Qwen3VLVideoProcessor(),
                    chat_template=processor.chat_template,
                )
            else:
                model = Qwen25(Qwen2_5_VLConfig(**shared))
                processor = Qwen2_5_VLProcessor(
                    Qwen2VLImageProcessor(size=pixels),
                    tokenizer,
                    Qwen2VLVideoProcessor(size=pixels),
                    chat_template=processor.chat_template,
                )
        finally:
            torch.set_default_dtype(default)
    model.generation_config = GenerationConfig(
        eos_token_id=token["<|im_end|>"], pad_token_id=token["<|endoftext|>"]
    )
    return model.eval(), processor
