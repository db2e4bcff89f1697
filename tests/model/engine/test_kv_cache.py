"""The cache has room for the prompts and completions that fit into the memory."""

from typing import Any

import pytest
import torch
from family_policies import build_family_policy
from recorded import record_calls
from tiny_models import sample_groups, text_prompts
from transformers import CONFIG_MAPPING

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine.kv_cache import count_free_tokens
from vlm_grpo.model.engine.packing import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.engine.shared import SharedEngine, _fit, round_up


def test_slots_and_places_fit_into_the_tokens_and_logits_of_those_with_places_into_the_memory():
    assert _fit(8, 4, 100, 50, 8 * (100 + 4 * 50)) == (8, 32)
    assert _fit(8, 4, 100, 50, 8 * (100 + 4 * 50) - 1) == (8, 20)
    assert _fit(8, 4, 100, 50, 300) == (1, 4)
    assert _fit(8, 4, 100, 50, 1) == (1, 4)
    for tokens in range(300, 3000, 7):
        slots, places = _fit(8, 4, 100, 50, tokens)
        assert slots * 100 + places * 50 <= tokens
    # Logits of 2,000 bytes per completion beside 10 bytes per token, in 8,000 usable bytes.
    assert fit_tokens(10_000, 10, 2_000, (2, 50)) == 400  # both: 4,000 bytes of logits
    # Of 1,000, those that have places: 160 tokens of 10 bytes, 3.2 completions of 2,000 bytes.
    assert fit_tokens(10_000, 10, 2_000, (1_000, 50)) == 160
    assert fit_tokens(-10_000, 10, 2_000, (2, 50)) == 0


def test_captured_lengths_grow_by_half_at_most():
    rounded = [round_up(n, 1000) for n in (1, 64, 65, 96, 97, 129, 200, 999)]
    assert rounded == [64, 64, 96, 96, 128, 192, 256, 1000]


def set_memory(patch: pytest.MonkeyPatch, free: int, reserved: int = 0, allocated: int = 0) -> None:
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    patch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    patch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def count(config: Any, completions: tuple[int, int], kept: int = 0, device: str = "cuda") -> int:
    place = torch.device(device)
    return count_free_tokens(config, place, torch.bfloat16, completions, kept)


@pytest.mark.parametrize(
    ("name", "per_token", "state"),
    [
        # layers × (keys and values) × heads × width
        ("gemma4", 2 * 2 * 2 * 8 + 2 * 2 * 2 * 16, 0),
        ("gemma4_moe", 2 * 2 * 2 * 8 + 2 * 2 * 1 * 16, 0),
        # inputs of a convolution over 4 tokens in bfloat16, and 4 heads of 8 × 8 in float32
        ("qwen3_5", 1 * 2 * 2 * 16, 3 * (4 * (16 + 16 + 32) * 2 + 4 * 8 * 8 * 4)),
        ("lfm2_vl", 2 * 2 * 2 * 8, 2 * 3 * 32 * 2),
    ],
)
def test_free_memory_holds_the_bytes_of_each_layer(name, per_token, state, monkeypatch):
    policy = build_family_policy(name, torch.bfloat16, shared=True)
    config = policy.model.config.get_text_config()
    set_memory(monkeypatch, 3 * 10**8, reserved=10**9, allocated=4 * 10**8)
    place = config.vocab_size * (2 + LOGIT_BYTES) + 2 * state
    found = count(config, (1000, 4), kept=10**8)
    assert found == fit_tokens(10**9, 2 * per_token, place, (1000, 4))
    assert count(config, (1000, 4), device="cpu") == DEFAULT_ROLLOUT_TOKENS

    opened = record_calls(monkeypatch, SharedEngine, "open_cache")
    sample_groups(policy, text_prompts(policy, (1,)), group_size=3, length=2)
    [(*_, cache)] = opened
    tokens = cache.size.prompt_length + 3 * 2
    assert cache.count_bytes() == tokens * 2 * per_token + (1 + 3) * state
    # The CPU's kernel reads the tokens of a key head one after the other.
    assert cache.get_keys().transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kind", ["opt", "pi0", "qwen3_next"])
def test_a_configuration_of_any_model_is_counted_or_has_the_default(kind, monkeypatch):
    """OPT has no key heads of its own, PI0 names no layers, and Qwen3-Next is hybrid."""
    set_memory(monkeypatch, 10**10)
    found = count(CONFIG_MAPPING[kind]().get_text_config(), (8, 64))
    assert (found == DEFAULT_ROLLOUT_TOKENS) == (kind == "pi0")
    assert found > 0
