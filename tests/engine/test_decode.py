"""Completions decoded from shared prompts are those of the model's ``generate``."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    FAMILIES,
    add_lora,
    mixed_prompts,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)

from vlm_grpo.engine.sampling import SamplingSettings


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(family: str) -> None:
    # Nothing is banned, as in plain ``generate``; in float64, rounding breaks no tie.
    policy = tiny_policy(family, dtype=torch.float64, temperature=0.0, banned=())
    prompts = mixed_prompts(policy, 40)
    groups = sample_groups(policy, prompts, group_size=1)
    plain = tiny_policy(family, shared=False, dtype=torch.float64)
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        tokens = torch.tensor([prompt.token_ids])
        output = plain.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **prompt.vision,
            max_new_tokens=12,
            do_sample=False,
        )
        assert completion.token_ids == tuple(output[0, tokens.shape[1] :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_and_entropies_equal_scored_ones(family: str) -> None:
    policy = tiny_policy(family, min_new_tokens=2)
    prompts = mixed_prompts(policy, 12)
    groups = sample_groups(policy, prompts, with_entropies=True)
    scored = policy.score(pack_groups(prompts, groups), with_entropy=True)
    assert (scored.logprobs - sampled_logprobs(groups)).abs().max() < 1e-4
    entropies = torch.tensor([value for group in groups for c in group for value in c.entropies])
    assert scored.entropies is not None
    assert (scored.entropies - entropies).abs().max() < 1e-4


def test_sampled_and_scored_logprobs_stay_close_in_bfloat16() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.bfloat16)
    prompts = mixed_prompts(policy, 4)
    groups = sample_groups(policy, prompts)
    with torch.no_grad():
        scored = policy.score(pack_groups(prompts, groups)).logprobs
    # bfloat16 has 8 bits of mantissa; logits here reach about 10, so 0.04 each, over 3 layers.
    assert (scored - sampled_logprobs(groups)).abs().mean() < 0.1


def test_sampling_with_merged_adapters_leaves_the_weights_unchanged() -> None:
    policy = tiny_policy("qwen2_5_vl")
    add_lora(policy, ["q_proj", "down_proj"])
    before = {n: w.clone() for n, w in policy.model.state_dict().items()}
    prompts = mixed_prompts(policy, 4)
    groups = sample_groups(policy, prompts)
    after = policy.model.state_dict()
    assert all(torch.equal(after[n], w) for n, w in before.items())
    scored = policy.score(pack_groups(prompts, groups)).logprobs
    assert scored.requires_grad  # the adapters are restored, and trained
    assert (scored - sampled_logprobs(groups)).abs().max() < 1e-4


def test_tokens_do_not_depend_on_the_number_of_slots() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=tuple(range(0, 256, 7)))
    prompts = mixed_prompts(policy, 14)
    at_once = sample_groups(policy, prompts)
    lengths = [len(c.token_ids) for group in at_once for c in group]
    assert min(lengths) < max(lengths)  # completions leave the batch at different times
    one_slot = sample_groups(policy, prompts, max_tokens=1)
    few_slots = sample_groups(policy, prompts, max_tokens=600)
    for other in (one_slot, few_slots):
        tokens = [[c.token_ids for c in group] for group in other]
        assert tokens == [[c.token_ids for c in group] for group in at_once]


def test_tokens_do_not_depend_on_the_other_prompts() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)
    prompts = mixed_prompts(policy, 5)
    together = sample_groups(policy, prompts)
    settings = SamplingSettings(policy.distribution, 12)
    for index, prompt in enumerate(prompts):
        (alone,) = policy.sample([prompt], settings, 3, [(0, index)], 100_000)
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[index]]


@pytest.mark.parametrize("max_tokens", [1, 600, 100_000])
def test_prompts_may_have_different_numbers_of_completions(max_tokens: int) -> None:
    """Each completion is the one with its number, whatever is sampled beside it."""
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=tuple(range(0, 256, 7)))
    prompts = mixed_prompts(policy, 7)
    expected = sample_groups(policy, prompts, group_size=5)
    numbers = [range(5), range(3, 5), range(1), range(4), range(2, 3), range(5), range(1, 4)]
    settings = SamplingSettings(policy.distribution, 12)
    seeds = [(0, index) for index in range(7)]
    found = policy.sample(prompts, settings, numbers, seeds, max_tokens)
    for own, members, whole in zip(numbers, found, expected, strict=True):
        assert [c.token_ids for c in members] == [whole[number].token_ids for number in own]
