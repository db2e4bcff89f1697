"""The attention of a decode step sees the cached keys of each completion, and no other keys."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_policies import build_family_policy
from gpu_standins import use_plain_varlen
from tiny_models import ENDS, mixed_prompts, read_tokens, sample_groups
from torch import Tensor

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import PrefillAttention
from vlm_grpo.model.engine.decode_attention import CachedKeys, SharedKeys
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.engine.kv_cache import CacheSize, KVCache


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
    visible = CachedKeys.build(lengths, 5, equal, key)
    output, lse = visible(query, key, value, 0.3)
    for row, length in enumerate(lengths.tolist()):
        check_attention(output[row], lse[row], query[row], key[row, :length], value[row, :length])


@pytest.mark.parametrize("parts", [1, 3])
def test_one_kernel_sees_parts_of_prompts_and_own_tokens_beside_hidden_slots(parts, monkeypatch):
    use_plain_varlen(monkeypatch)
    cache = KVCache(CacheSize(3, 5, 7, 4))
    prefill = PrefillAttention([GroupSpan(0, 2, ())])
    first, second = torch.zeros(2, 1, 2, 2, 8).double()
    prefill.keys, prefill.heads = {0: (first, second)}, [(4, 2)]
    cache.store_prompts([0], prefill, [np.arange(2)])
    cache.restore(2, 3)
    torch.manual_seed(0)
    for tensor in (*cache.prompts[0], *cache.completions[0]):
        tensor.normal_()
    lengths = torch.tensor([5, 6]), torch.tensor([1, 4, 2])
    visible = [CachedKeys(x, int(x.max())) for x in lengths]
    queries = torch.randn(2, 3, 2, 8).double(), torch.randn(3, 2, 2, 8).double()
    rows = torch.cat([x.flatten(0, 1) for x in (*[queries[0]] * parts, queries[1])])
    keys = SharedKeys.build(cache, [3, 2], visible, parts)
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
    every = CachedKeys.build(torch.tensor([5, 3]), 5, False, keys)
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
