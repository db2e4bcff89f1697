"""What is sampled from shared prompts is what the model's own ``generate`` would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from tiny_models import FAMILIES, noise_example, tiny_policy

from vlm_grpo.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.engine.linear import use_fast_linears
from vlm_grpo.engine.sampling import SamplingDistribution, SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Prompt


class Plain(Task):
    """Asks the example's question as it stands."""


def mixed_prompts(policy: Policy, count: int) -> list[Prompt]:
    """Prompts with no, one or two images of many sizes, and questions of many lengths."""
    random = np.random.default_rng(0)
    prompts = []
    for index in range(count):
        sizes = [
            (int(w), int(h)) for w, h in random.integers(20, 150, (int(random.integers(0, 3)), 2))
        ]
        question = "What? " * int(random.integers(1, 8))
        example = noise_example(str(index), sizes, question, seed=index)
        prompts.append(policy.build_prompt(policy.with_resized_sizes(example), Plain()))
    return prompts


def seeds(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(0, index) for index in range(len(prompts))]


def sample(
    policy: Policy, prompts: list[Prompt], group: int = 3, max_tokens: int = 100_000, **more
) -> list[tuple[Completion, ...]]:
    settings = SamplingSettings(policy.distribution, more.pop("length", 12), **more)
    return policy.sample(prompts, settings, group, seeds(prompts), max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(family: str) -> None:
    # Nothing banned, as in plain ``generate``; in float64 no tie is broken by rounding.
    policy = tiny_policy(family, dtype=torch.float64, temperature=0.0, banned=())
    prompts = mixed_prompts(policy, 100)
    ours = sample(policy, prompts, group=1)
    plain = tiny_policy(family, shared=False, dtype=torch.float64)
    for prompt, (completion,) in zip(prompts, ours, strict=True):
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
def test_rollout_logprobs_equal_scored_ones(family: str) -> None:
    policy = tiny_policy(family, min_new_tokens=2)
    prompts = mixed_prompts(policy, 12)
    groups = sample(policy, prompts)
    slices = [
        GroupSlice(p, tuple(c.token_ids for c in g), tuple(range(3 * i, 3 * i + 3)))
        for i, (p, g) in enumerate(zip(prompts, groups, strict=True))
    ]
    recorded = torch.tensor([v for group in groups for c in group for v in c.logprobs])
    assert (policy.score(MicroBatch(tuple(slices))).logprobs - recorded).abs().max() < 1e-4


def test_sampled_frequencies_follow_the_models_distribution() -> None:
    policy = tiny_policy("qwen2_5_vl")
    prompt = policy.build_prompt(policy.with_resized_sizes(noise_example("a", [(56, 56)])), Plain())
    draws = 4000
    group = sample(policy, [prompt], group=draws, length=1)[0]
    every = tuple((token,) for token in range(policy.model.config.text_config.vocab_size))
    batch = MicroBatch((GroupSlice(prompt, every, tuple(range(len(every)))),))
    with torch.no_grad():
        probabilities = policy.score(batch).logprobs.double().exp().numpy()
    # Banned tokens have probability 0; the rest sum to 1.
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
    counts = np.bincount([c.token_ids[0] for c in group], minlength=len(every))
    assert counts[list(policy.distribution.banned)].sum() == 0
    common = probabilities * draws >= 5  # the test's usual condition on expected counts
    observed = [*counts[common], counts[~common].sum()]
    expected = [*(probabilities[common] * draws), probabilities[~common].sum() * draws]
    expected = np.asarray(expected) * sum(observed) / sum(expected)
    # With fixed seeds this is one fixed draw, not a test that fails one time in a thousand.
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_streaming_through_few_slots_changes_nothing() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=tuple(range(0, 256, 7)))
    prompts = mixed_prompts(policy, 14)
    at_once = sample(policy, prompts)
    lengths = [len(c.token_ids) for group in at_once for c in group]
    assert min(lengths) < max(lengths)  # completions leave the batch at different times
    one_by_one = sample(policy, prompts, max_tokens=1)
    few = sample(policy, prompts, max_tokens=600)
    for other in (one_by_one, few):
        tokens = [[c.token_ids for c in group] for group in other]
        assert tokens == [[c.token_ids for c in group] for group in at_once]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_sample_the_same_tokens(family: str) -> None:
    results = []
    for shared in (True, False):
        policy = tiny_policy(family, shared, torch.float64)
        results.append(sample(policy, mixed_prompts(policy, 6)))
    ours, plain = ([[c.token_ids for c in group] for group in r] for r in results)
    assert ours == plain


@pytest.mark.parametrize("shared", [True, False])
def test_what_ends_a_completion(shared: bool) -> None:
    every_fifth = tuple(range(0, 256, 5))
    policy = tiny_policy("qwen2_5_vl", shared, eos=every_fifth, min_new_tokens=3)
    groups = sample(policy, mixed_prompts(policy, 8), length=6)
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
def test_stop_strings_end_a_completion(shared: bool) -> None:
    policy = tiny_policy("qwen2_5_vl", shared)
    groups = sample(policy, mixed_prompts(policy, 8), length=40, stop=("%", "Q"))
    stopped = [c for group in groups for c in group if c.stop == "stop"]
    assert stopped  # one byte in 128 is a "%" or a "Q", and there are 24 × 40 of them
    for completion in stopped:
        assert completion.text[-1] in "%Q"
        assert not set(completion.text[:-1]) & set("%Q")


def test_a_completion_does_not_depend_on_the_prompts_beside_it() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)
    prompts = mixed_prompts(policy, 5)
    together = sample(policy, prompts)
    settings = SamplingSettings(policy.distribution, 12)
    for index, prompt in enumerate(prompts):
        (alone,) = policy.sample([prompt], settings, 3, [(0, index)], 100_000)
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[index]]


@pytest.mark.parametrize(
    "truncation", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.5}]
)
def test_truncated_sampling_keeps_to_the_likely_tokens(truncation: dict) -> None:
    policy = tiny_policy("qwen2_5_vl")
    prompt = policy.build_prompt(policy.with_resized_sizes(noise_example("a", [(56, 56)])), Plain())
    (group,) = sample(policy, [prompt], group=300, length=1, **truncation)
    every = tuple((token,) for token in range(policy.model.config.text_config.vocab_size))
    batch = MicroBatch((GroupSlice(prompt, every, tuple(range(len(every)))),))
    with torch.no_grad():
        probabilities = policy.score(batch).logprobs.exp().double().numpy()
    order = np.argsort(-probabilities)
    kept = set(order.tolist())
    if "top_k" in truncation:
        kept &= set(order[: truncation["top_k"]].tolist())
    if "min_p" in truncation:
        kept &= set(np.flatnonzero(probabilities >= 0.5 * probabilities.max()).tolist())
    if "top_p" in truncation:
        rest = np.where([t in kept for t in order], probabilities[order], 0.0)
        before = (rest.cumsum() - rest) / rest.sum()
        kept &= set(order[before < truncation["top_p"]].tolist())
    drawn = {c.token_ids[0]: c.logprobs[0] for c in group}
    assert set(drawn) <= kept
    # What is recorded is the probability under the truncated distribution.
    mass = sum(probabilities[t] for t in kept)
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(float(np.log(probabilities[token] / mass)), abs=1e-4)


def test_bfloat16_rollout_and_score_stay_close() -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.bfloat16)
    prompts = mixed_prompts(policy, 4)
    groups = sample(policy, prompts)
    slices = [
        GroupSlice(p, tuple(c.token_ids for c in g), (0, 1, 2))
        for p, g in zip(prompts, groups, strict=True)
    ]
    recorded = torch.tensor([v for group in groups for c in group for v in c.logprobs])
    with torch.no_grad():
        scored = policy.score(MicroBatch(tuple(slices))).logprobs
    # bfloat16 has 8 bits of mantissa; logits here reach about 10, so 0.04 each, over 3 layers.
    assert (scored - recorded).abs().mean() < 0.1


def test_temperature_is_part_of_the_scored_distribution() -> None:
    cold, warm = (tiny_policy("qwen2_5_vl", temperature=t) for t in (0.5, 2.0))
    prompt = cold.build_prompt(cold.with_resized_sizes(noise_example("a", [(56, 56)])), Plain())
    every = tuple((token,) for token in range(256))
    batch = MicroBatch((GroupSlice(prompt, every, tuple(range(256))),))
    with torch.no_grad():
        a, b = cold.score(batch).logprobs, warm.score(batch).logprobs
    # log-odds between two tokens scale with 1 / temperature.
    assert torch.allclose((a[0] - a[1]) / 4, b[0] - b[1], atol=1e-4)


def test_greedy_settings_score_at_temperature_one() -> None:
    logits = torch.randn(2, 8)
    positions = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(SamplingDistribution(temperature=0.0)(logits, positions), logits)


def test_folded_adapters_sample_what_the_adapters_score() -> None:
    policy = tiny_policy("qwen2_5_vl")
    torch.manual_seed(1)
    get_peft_model(policy.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    use_fast_linears(policy.model)
    before = {n: w.clone() for n, w in policy.model.state_dict().items()}
    prompts = mixed_prompts(policy, 4)
    groups = sample(policy, prompts)
    after = policy.model.state_dict()
    assert all(torch.equal(after[n], w) for n, w in before.items())
    slices = [
        GroupSlice(p, tuple(c.token_ids for c in g), (0, 1, 2))
        for p, g in zip(prompts, groups, strict=True)
    ]
    recorded = torch.tensor([v for group in groups for c in group for v in c.logprobs])
    scored = policy.score(MicroBatch(tuple(slices))).logprobs
    assert scored.requires_grad  # the adapters are back, and trained
    assert (scored - recorded).abs().max() < 1e-4
