"""Decoded completions keep the special tokens of a family's answers, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import noise_example, tiny_policy
from transformers import (
    Gemma4Config,
    Glm4vConfig,
    InternVLConfig,
    LlavaConfig,
    PaliGemmaConfig,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from vlm_grpo.data_scripts.tiny_vlm import SPECIAL_TOKENS
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.families import Family, load_family
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.parsing import parse_boxes
from vlm_grpo.task.registry import load_task

INTERNVL = [f"<{mark}{name}>" for name in ("ref", "box", "quad", "img") for mark in ("", "/")]
PALIGEMMA = [f"<loc{number:04d}>" for number in range(1024)] + ["<seg000>", "<image>"]
FAMILIES: dict[str, tuple[Any, list[str]]] = {
    "qwen2_vl": (Qwen2VLConfig, []),
    "resized": (Qwen2_5_VLConfig, []),
    "permille": (Qwen3VLConfig, []),
    "internvl": (InternVLConfig, [*INTERNVL, "<IMG_CONTEXT>"]),
    "glm": (Glm4vConfig, ["<|begin_of_box|>", "<|end_of_box|>", "<|begin_of_image|>", "<|image|>"]),
    "paligemma": (PaliGemmaConfig, PALIGEMMA),
    "gemma4": (Gemma4Config, ["<|image|>", "<image|>"]),
    "fraction": (LlavaConfig, ["<image>"]),
}
"""For each family, by its coordinate frame: the configuration and additional special tokens."""


def load_family_and_tokenizer(frame: str) -> tuple[Family, Any]:
    config, special = FAMILIES[frame]
    alphabet = [*map(chr, range(33, 127)), "Ġ"]  # how byte-level tokenizers write a space
    tokenizer = Qwen2Tokenizer(
        vocab={letter: number for number, letter in enumerate(alphabet)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL_TOKENS, *special],
    )
    return load_family(config()), tokenizer


@pytest.mark.parametrize("frame", FAMILIES)
def test_decoded_boxes_can_be_parsed_and_other_special_tokens_are_removed(frame: str) -> None:
    family, tokenizer = load_family_and_tokenizer(frame)
    assert family.frame == frame
    boxes, size = [(64.0, 48.0, 320.0, 240.0), (0.0, 24.0, 608.0, 456.0)], (640, 480)
    written = FRAMES[frame].write_all(boxes, size, size, labels=["red mug", "cat"])
    tokens = tokenizer(written)["input_ids"]
    others = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|image_pad|>"])
    text = family.decoder(tokenizer)([*tokens, *others])
    assert text == written
    read = parse_boxes(text, y_first=FRAMES[frame].y_first)
    assert read is not None
    assert [label for _, label in read] == ["red mug", "cat"]
    if frame in ("qwen2_vl", "internvl", "glm", "paligemma"):  # the others write plain JSON
        assert tokenizer.decode(tokens, skip_special_tokens=True) != written
    assert Family().decoder(tokenizer)(tokenizer.all_special_ids) == ""
    kept = family.decoder(tokenizer)(tokenizer.all_special_ids)
    for name in ("im_", "endoftext", "vision", "image", "img", "IMG", "video"):
        assert name not in kept


def test_completions_keep_the_special_tokens_of_answers() -> None:
    policy = tiny_policy("qwen2_vl")
    task = load_task("detection", frame=policy.prompts.frame)
    prompt = policy.prompts.build(
        policy.prompts.with_resized_sizes(noise_example("a", [(56, 56)])), task
    )
    sampling = SamplingSettings(policy.distribution, 64, ())
    (members,) = policy.sample([prompt], sampling, 8, [(0, "a")], 100_000)
    start = policy.tokenizer.convert_tokens_to_ids("<|box_start|>")
    # 512 samples from about 270 tokens of a random model contain each token about twice.
    assert any(start in completion.token_ids for completion in members)
    for completion in members:
        count = completion.token_ids.count(start)
        assert completion.text.count("<|box_start|>") == count
        assert "<|im_" not in completion.text
        assert "<|endoftext|>" not in completion.text
