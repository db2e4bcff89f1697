"""Tokens follow the sampling distribution, and completions end where the settings say."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import image_prompts, mixed_prompts, pack_tokens, sample_groups, tiny_policy

from vlm_grpo.model.engine.sampling import (
    SamplerState,
    SamplingDistribution,
    SamplingSettings,
    _compute_entropy,
    _invert,
)


def test_sampled_frequencies_follow_the_scored_distribution():
    policy = tiny_policy("qwen2_5_vl")
    [prompt] = image_prompts(policy, [[(56, 56)]])
    samples = 4000
    (group,) = sample_groups(policy, [prompt], samples, length=1)
    every = [(token,) for token in range(policy.model.config.text_config.vocab_size)]
    with torch.no_grad():
        probabilities = policy.score(pack_tokens([prompt], [every])).logprobs.double().exp().numpy()
    # Banned tokens have probability 0; the rest sum to 1.
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
    counts = np.bincount([c.token_ids[0] for c in group], minlength=len(probabilities))
    assert counts[list(policy.distribution.banned)].sum() == 0
    common = probabilities * samples >= 5  # the test's usual condition on expected counts
    observed = [*counts[common], counts[~common].sum()]
    expected = [*(probabilities[common] * samples), probabilities[~common].sum() * samples]
    expected = np.asarray(expected) * sum(observed) / sum(expected)
    # The seeds are fixed, so this either always passes or always fails.
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1000.0])
def test_entropies_are_those_of_the_probabilities(scale):
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * scale + 40
    logits[:, ::7] = -torch.inf  # banned tokens
    logits[0, 1:] = -torch.inf
    logits[0, 0] = 0.0  # one token is certain
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    found = _compute_entropy(logits, logits.softmax(-1))
    assert found[0] == 0
    assert (found - expected).abs().max() < 1e-5 * max(1, expected.max())


@pytest.mark.parametrize("shared", [True, False])
def test_completions_end_at_eos_or_at_the_length_limit(shared):
    every_fifth = tuple(range(0, 256, 5))
    policy = tiny_policy("qwen2_5_vl", shared, eos=every_fifth, min_new_tokens=3)
    groups = sample_groups(policy, mixed_prompts(policy, 8), length=6)
    reasons = set()
    for completion in (c for group in groups for c in group):
        reasons.add(completion.stop)
        *before, last = completion.token_ids
        assert 3 <= len(completion.token_ids) <= 6
        assert not set(before) & set(every_fifth)
        assert (completion.stop == "eos") == (last in every_fifth)
        assert completion.stop == "eos" or len(completion.token_ids) == 6
    assert reasons == {"eos", "length"}


@pytest.mark.parametrize("shared", [True, False])
def test_stop_strings_end_a_completion(shared):
    policy = tiny_policy("qwen2_5_vl", shared)
    ends = "%Q#@~"  # which no control token has
    groups = sample_groups(policy, mixed_prompts(policy, 6), length=14, stop=tuple(ends))
    stopped = [c for group in groups for c in group if c.stop == "stop"]
    assert stopped  # one byte in 51 is one of these, and there are up to 18 × 14 bytes
    for completion in stopped:
        assert completion.text[-1] in ends
        assert not set(completion.text[:-1]) & set(ends)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ({"top_k": 3}, [1, 3, 5]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.7}, [1, 3, 5]),
        ({"min_p": 0.5}, [1, 3]),
        ({"top_k": 5, "top_p": 0.67}, [1, 3]),  # 0.67 of 0.96 is less than 0.65
    ],
)
def test_truncated_sampling_keeps_to_the_most_likely_tokens(truncation, kept):
    probabilities = torch.tensor([0.1, 0.4, 0.04, 0.25, 0.06, 0.15], dtype=torch.float64)
    uniform = torch.linspace(0, 1, 101, dtype=torch.float64)[:-1, None]
    state = SamplerState(uniform, SamplingSettings(SamplingDistribution(), 1, **truncation))
    tokens = state.sample(probabilities.log().expand(100, -1), torch.arange(100))
    assert sorted(set(tokens.tolist())) == kept
    # The recorded probability is the one under the truncated distribution.
    expected = probabilities[tokens] / probabilities[kept].sum()
    assert state.logprobs[:-1, 0].exp().tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_top_p_keeps_no_token_beyond_its_mass_and_every_token_at_one():
    distribution = SamplingDistribution()
    uniform = torch.linspace(0, 1, 33, dtype=torch.float64)[:-1, None]
    state = SamplerState(uniform, SamplingSettings(distribution, 1, top_p=0.5))
    # Of four equally likely tokens, two have half of the probability.
    tokens = state.sample(torch.zeros(32, 4), torch.arange(32))
    assert len(tokens.unique()) == 2
    assert state.logprobs[:-1].flatten().exp().tolist() == pytest.approx([0.5] * 32)
    assert not SamplingSettings(distribution, 1, top_p=1.0).truncates
    settings = SamplingSettings(distribution, 1, top_k=2, top_p=1.0)
    assert settings.truncates
    # Also one of probability 1e-13, which float32 loses in a sum with the other's.
    state = SamplerState(torch.tensor([[1 - 1e-14]], dtype=torch.float64), settings)
    assert state.sample(torch.tensor([[0.0, -30.0, -60.0]]), torch.arange(1)).tolist() == [1]


@pytest.mark.parametrize("every", [1, 8])
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(every):
    """Also where a character has several tokens, and later ones were sampled before the check."""
    stop = ("ab", "é!", "</answer>")
    alphabet = "ab!é\u0161</answer>".encode()  # é and š share their first byte
    random = np.random.default_rng(0)
    settings = SamplingSettings(SamplingDistribution(), 24, stop=stop)
    state = SamplerState(torch.zeros(80, 24, dtype=torch.float64), settings, decode_bytes)
    texts = random.choice(list(alphabet), (80, 24))
    texts[:20, 5:14] = list(b"</answer>")
    for position in range(24):
        logits = torch.full((80, 256), -torch.inf)
        logits[torch.arange(80), torch.from_numpy(texts[:, position])] = 0.0
        state.sample(logits, torch.arange(80))
        if position % every == every - 1 or position == 23:
            state.update_active()
    for row, text in enumerate(texts.tolist()):
        ends = [n for n in range(1, 25) if any(s in decode_bytes(text[:n]) for s in stop)]
        assert int(state.lengths[row]) == min([*ends, 24])
        assert (row in state.stopped) == bool(ends)
    assert 20 < len(state.stopped) < 80


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("vocabulary", [5, 2048, 2053, 4096, 6000])
def test_a_token_is_sampled_where_the_cumulative_probability_exceeds_the_number(vocabulary):
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(64, vocabulary, generator=generator).mul(3).softmax(-1)
    probs[:, 1::3] = 0
    probs /= probs.sum(-1, keepdim=True)
    uniform = torch.rand(64, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    tokens = _invert(probs, uniform)
    cumulative = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
    chosen = tokens[:, None]
    assert (probs.gather(1, chosen) > 0).all()
    assert (cumulative.gather(1, chosen)[:, 0] >= uniform - 1e-7).all()
    before = cumulative.gather(1, chosen) - probs.double().gather(1, chosen)
    assert (before[:, 0] <= uniform + 1e-6).all()


def test_nothing_is_stored_for_finished_completions():
    uniform = torch.rand(3, 4, dtype=torch.float64)
    state = SamplerState(uniform, SamplingSettings(SamplingDistribution(eos=(2,)), 4))
    logits = torch.full((3, 5), -torch.inf)
    logits[[0, 1, 2], [1, 2, 3]] = 0.0
    for _ in range(6):  # two more than the longest completion has tokens
        state.sample(logits, torch.tensor([0, 1, 2]))
    assert state.tokens[:3].tolist() == [[1] * 4, [2, 0, 0, 0], [3] * 4]
    assert state.lengths[:3].tolist() == [4, 1, 4]
    assert not state.update_active().any()
