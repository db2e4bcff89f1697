"""The cache gives every completion a place and its prompt, and attention sees no other keys."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_policies import build_family_policy
from gpu_standins import use_plain_varlen
from recorded import record_calls
from tiny_models import ENDS, mixed_prompts, read_tokens, sample_groups, text_prompts
from torch import Tensor
from transformers import CONFIG_MAPPING

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine import kernels, kv_cache
from vlm_grpo.model.engine.attention import PrefillAttention
from vlm_grpo.model.engine.batch import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.engine.shared import SharedEngine, _fit, round_up


def check_attention(output: Tensor, lse: Tensor, query: Tensor, key: Any, value: Any) -> None:
    """Compare the attention of n queries with the softmax over all keys."""
    scores = torch.einsum("nhd,mhd->nhm", query, key) * 0.3
    expected = torch.einsum("nhm,mhd->nhd", scores.softmax(-1), value)
    assert (output - expected).abs().max() < 1e-12
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-12


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_cached_attention_equals_a_softmax_over_the_visible_keys(on_cpu, equal, monkeypatch):
    monkeypatch.setattr(kernels, "is_cpu", lambda query: on_cpu)
    torch.manual_seed(0)
    query = torch.randn(3, 4, 2, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, 7, 2, 8, dtype=torch.float64)
    lengths = torch.tensor([5, 5, 5] if equal else [5, 1, 4])
    visible = kv_cache.CachedKeys.build(lengths, 5, equal, key)
    output, lse = visible(query, key, value, 0.3)
    for row, length in enumerate(lengths.tolist()):
        check_attention(output[row], lse[row], query[row], key[row, :length], value[row, :length])


@pytest.mark.parametrize("parts", [1, 3])
def test_one_kernel_sees_parts_of_prompts_and_own_tokens_beside_hidden_slots(parts, monkeypatch):
    use_plain_varlen(monkeypatch)
    cache = kv_cache.KVCache(kv_cache.CacheSize(3, 5, 7, 4))
    prefill = PrefillAttention([GroupSpan(0, 2, ())])
    first, second = torch.zeros(2, 1, 2, 2, 8).double()
    prefill.keys, prefill.heads = {0: (first, second)}, [(4, 2)]
    cache.store_prompts([0], prefill, [np.arange(2)])
    cache.restore(2, 3)
    torch.manual_seed(0)
    for tensor in (*cache.prompts[0], *cache.completions[0]):
        tensor.normal_()
    lengths = torch.tensor([5, 6]), torch.tensor([1, 4, 2])
    visible = [kv_cache.CachedKeys(x, int(x.max())) for x in lengths]
    queries = torch.randn(2, 3, 2, 8).double(), torch.randn(3, 2, 2, 8).double()
    rows = torch.cat([x.flatten(0, 1) for x in (*[queries[0]] * parts, queries[1])])
    keys = kv_cache.SharedKeys.build(cache, [3, 2], visible, parts)
    assert keys.longest == (3, 6 if parts == 1 else 4)
    output, lse = keys(rows, *cache.joined[0], 0.3)
    start = 0
    for kind, part in [*[(0, part) for part in range(parts)], (1, 0)]:
        query, (key, value) = queries[kind], (cache.prompts, cache.completions)[kind][0]
        for row, length in enumerate(lengths[kind].tolist()):
            found = output[start:][: query.shape[1]], lse[start:][: query.shape[1]]
            first, last = (0, length) if kind else [length * n // parts for n in (part, part + 1)]
            check_attention(*found, query[row], key[row, first:last], value[row, first:last])
            start += query.shape[1]
    assert start == len(output)


def test_prompts_are_split_where_a_gpu_would_be_idle(monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cases = {(16, 1300, 1400): 5, (16, 4000, 4096): 8, (2, 9000, 9000): 16, (16, 290, 300): 1}
    cases |= {(133, 5000, 5000): 1, (16, 3, 1400): 3}
    for (sequences, shortest, longest), parts in cases.items():
        assert kernels.count_parts(torch.device("cuda"), sequences, shortest, longest) == parts


def test_queries_in_a_window_see_the_keys_from_their_first_one_to_the_last_of_their_row():
    keys = torch.zeros(2, 5, 1, 1)
    every = kv_cache.CachedKeys.build(torch.tensor([5, 3]), 5, False, keys)
    mask: Any = every.starting_at(torch.tensor([[2, 0], [-1, 3]]), keys).mask
    seen = [[row.nonzero().flatten().tolist() for row in rows] for rows in mask[:, 0] == 0]
    assert seen == [[[2, 3, 4], [0, 1, 2, 3, 4]], [[0, 1, 2], []]]


@pytest.mark.parametrize(("family", "parts"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 3), ("gemma3", 3)])
def test_the_kernel_of_gpus_samples_the_tokens_of_the_cpu(family, parts, monkeypatch):
    """Layers with windows, which need masks, do not split prompts."""
    policy = build_family_policy(family, torch.float64, shared=True, eos=ENDS)
    prompts = mixed_prompts(policy, 4)
    expected = sample_groups(policy, prompts, max_tokens=600)  # a few places at a time
    use_plain_varlen(monkeypatch)
    calls: list[Any] = []
    monkeypatch.setattr(kernels, "count_parts", lambda _, *given: calls.append(given) or parts)
    found = sample_groups(policy, prompts, max_tokens=600)
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    assert {given[1] for given in calls} == ({shortest} if family != "gemma3" else set())
    assert read_tokens(found) == read_tokens(expected)


def test_empty_slots_have_as_many_tokens_as_parts():
    scheduler = kv_cache.SlotScheduler(np.array([5, 7]), [2, 2], slots=2, places=2)
    scheduler.admit()  # the completions of one prompt fill all places
    _, lengths, *_ = scheduler.build_index([(4, 2)], torch.device("cpu"), parts=3)
    assert lengths.tolist() == [7, 3]


@pytest.mark.parametrize(("slots", "places"), [(1, 2), (2, 3), (3, 4), (6, 24)])
def test_every_completion_gets_a_place_beside_its_prompt(slots, places):
    """A place is free for another completion, of any prompt, as soon as its own is finished."""
    random = np.random.default_rng(0)
    scheduler = kv_cache.SlotScheduler(np.array([5, 3, 1, 6, 2, 4]), [4] * 6, slots, places)
    left = random.integers(1, 9, 24)  # steps until each completion is finished
    started: list[int] = []
    steps = 0
    while not scheduler.is_empty:
        new_slots, _ = scheduler.admit()
        started += scheduler.prompts[new_slots].tolist()
        waiting = 24 - int((left <= 0).sum()) - int((scheduler.rows >= 0).sum())
        free_slots = int((scheduler.prompts < 0).sum())
        assert not waiting or not free_slots or (scheduler.rows >= 0).all()
        kept = scheduler.shrink(0.5)
        assert kept is None or not waiting
        used = np.flatnonzero(scheduler.rows >= 0)
        assert len(set(scheduler.rows[used])) == len(used)
        found = scheduler.prompts[scheduler.find_slots(used)]
        assert (found == scheduler.rows[used] // 4).all()
        left[scheduler.rows[used]] -= 1
        scheduler.release(left > 0)
        steps += 1
    assert started == [3, 0, 5, 1, 4, 2]
    assert (left == 0).all()
    assert steps < 60 * 4 / places + 9


def test_empty_places_are_given_up_when_none_waits():
    scheduler = kv_cache.SlotScheduler(np.array([2, 1]), [4] * 2, 2, 8)
    scheduler.admit()
    assert scheduler.shrink(0.5) is None
    for active, slots, places in (([2, 4], [0, 1], [2, 4]), ([4], [1], [1])):
        scheduler.release(np.isin(np.arange(8), active))
        kept: Any = scheduler.shrink(0.5)
        assert (kept[0].tolist(), kept[1].tolist()) == (slots, places)
        assert scheduler.rows.tolist() == active


def test_an_empty_slot_is_kept_beside_the_first_prompt():
    scheduler = kv_cache.SlotScheduler(np.array([3, 2, 1]), [2] * 3, 3, 6)
    scheduler.admit()
    scheduler.release(np.isin(np.arange(6), [0, 4]))
    kept: Any = scheduler.shrink(0.5)
    assert [part.tolist() for part in kept] == [[0, 2, 1], [0, 4, 1]]
    assert scheduler.prompts.tolist() == [0, 2, -1]


def test_slots_and_places_fit_into_the_tokens():
    assert _fit(8, 4, 100, 50, 8 * (100 + 4 * 50)) == (8, 32)
    assert _fit(8, 4, 100, 50, 8 * (100 + 4 * 50) - 1) == (8, 20)
    assert _fit(8, 4, 100, 50, 300) == (1, 4)
    assert _fit(8, 4, 100, 50, 1) == (1, 4)
    for tokens in range(300, 3000, 7):
        slots, places = _fit(8, 4, 100, 50, tokens)
        assert slots * 100 + places * 50 <= tokens


def test_captured_lengths_grow_by_half_at_most():
    rounded = [round_up(n, 1000) for n in (1, 64, 65, 96, 97, 129, 200, 999)]
    assert rounded == [64, 64, 96, 96, 128, 192, 256, 1000]


def set_memory(patch: pytest.MonkeyPatch, free: int, reserved: int = 0, allocated: int = 0) -> None:
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    patch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    patch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def count(config: Any, completions: tuple[int, int], kept: int = 0, device: str = "cuda") -> int:
    place = torch.device(device)
    return kv_cache.count_free_tokens(config, place, torch.bfloat16, completions, kept)


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


def test_room_is_left_for_the_logits_of_all_completions_or_of_those_that_have_places():
    """Logits of 2,000 bytes per completion beside 10 bytes per token, in 8,000 usable bytes."""
    assert fit_tokens(10_000, 10, 2_000, (2, 50)) == 400  # both: 4,000 bytes of logits
    # Of 1,000, those that have places: 160 tokens of 10 bytes, 3.2 completions of 2,000 bytes.
    assert fit_tokens(10_000, 10, 2_000, (1_000, 50)) == 160
    assert fit_tokens(-10_000, 10, 2_000, (2, 50)) == 0
