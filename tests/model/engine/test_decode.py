"""Completions decoded from shared prompts are those of the model's ``generate``, and of repeated
prompts; captured steps are kept, or given up where they fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_steps import TracedStep
from family_policies import build_family_policy
from tiny_models import (
    FAMILIES,
    add_lora,
    make_prompt,
    mixed_prompts,
    noise_example,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)
from torch import Tensor

from vlm_grpo.model.engine import shared
from vlm_grpo.model.engine.graphs import DecodeStep
from vlm_grpo.model.engine.sampling import SamplingSettings


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


@pytest.mark.parametrize(
    ("family", "lora"), [*((family, False) for family in FAMILIES), ("qwen2_5_vl", True)]
)
def test_sampled_logprobs_and_entropies_equal_scored_ones(family: str, lora: bool) -> None:
    policy = tiny_policy(family, min_new_tokens=2)
    if lora:
        add_lora(policy, ["q_proj", "down_proj"])
    before = {n: w.clone() for n, w in policy.model.state_dict().items()}
    prompts = mixed_prompts(policy, 12)
    groups = sample_groups(policy, prompts, with_entropies=True)
    after = policy.model.state_dict()
    assert all(torch.equal(after[n], w) for n, w in before.items())
    scored = policy.score(pack_groups(prompts, groups), with_entropy=True)
    assert scored.logprobs.requires_grad  # merged adapters are restored, and trained
    assert (scored.logprobs - sampled_logprobs(groups)).abs().max() < 1e-4
    entropies = torch.tensor([value for group in groups for c in group for value in c.entropies])
    assert scored.entropies is not None
    assert (scored.entropies - entropies).abs().max() < 1e-4


def get_tokens(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def test_tokens_do_not_depend_on_slots_other_prompts_or_other_completions() -> None:
    """Each completion is the one with its number, whatever is sampled beside it."""
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=tuple(range(0, 256, 7)))
    prompts = mixed_prompts(policy, 7)
    expected = get_tokens(sample_groups(policy, prompts, group_size=5))
    lengths = [len(tokens) for group in expected for tokens in group]
    assert min(lengths) < max(lengths)  # completions leave the batch at different times
    numbers = [range(5), range(3, 5), range(1), range(4), range(2, 3), range(5), range(1, 4)]
    kept = [[whole[n] for n in own] for own, whole in zip(numbers, expected, strict=True)]
    settings = SamplingSettings(policy.distribution, 12)
    seeds = [(0, index) for index in range(7)]
    for max_tokens in (1, 600, 100_000):  # one slot, a few, or all at once
        assert get_tokens(policy.sample(prompts, settings, numbers, seeds, max_tokens)) == kept
    for index, prompt in enumerate(prompts[:3]):
        alone = policy.sample([prompt], settings, 5, [seeds[index]], 100_000)
        assert get_tokens(alone) == [expected[index]]


def test_batches_of_repeated_prompts_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sizes = tiny_policy("qwen2_5_vl", shared=False), []
    generate = policy.model.generate

    def record_size(**inputs: Any) -> Any:
        rows, length = inputs["input_ids"].shape
        sizes.append((rows, rows * (length + 12)))  # 12 new tokens
        return generate(**inputs)

    monkeypatch.setattr(policy.model, "generate", record_size)
    sample_groups(policy, mixed_prompts(policy, 6), max_tokens=300)
    assert max(rows for rows, _ in sizes) > 1
    assert all(tokens <= 300 or rows == 1 for rows, tokens in sizes)


def test_rollouts_that_fit_into_the_kept_cache_capture_no_steps_again() -> None:
    policy, eager = (tiny_policy("qwen2_5_vl", dtype=torch.float64) for _ in range(2))
    policy.engine.use_capture(TracedStep)

    def count(words: int, prompts: int, length: int = 12, max_tokens: int = 100_000) -> int:
        """Return the number of captures of a rollout, whose tokens must be right."""
        examples = [noise_example(str(n), [], "What? " * (words - n)) for n in range(prompts)]
        built = [make_prompt(policy, example) for example in examples]
        before = TracedStep.traces
        groups, expected = (
            sample_groups(p, built, length=length, max_tokens=max_tokens) for p in (policy, eager)
        )
        assert get_tokens(groups) == get_tokens(expected)
        return TracedStep.traces - before

    assert count(60, 3) == 1
    assert count(5, 3) == count(60, 3) == count(5, 3, length=9) == 0
    assert count(5, 2) == 1  # the first of two prompts, in the same memory
    assert count(60, 3) == count(5, 2) == 0
    # Three prompts of 64 tokens and nine completions of 12 fit, three of 448 tokens do not.
    assert count(5, 3, max_tokens=3 * 64 + 9 * 12) == 1
    assert count(5, 3, max_tokens=3 * 64 + 9 * 12) == 0
    assert count(70, 3) == 1
    assert count(5, 3, max_tokens=1) > 0  # one prompt at a time, in more than one token
    assert count(5, 3, max_tokens=1) == 0
    assert policy.describe_engine().endswith("as CUDA graphs")


@pytest.mark.parametrize(("name", "limit"), [("KEPT_STEPS", 0), ("KEPT_SHARE", 0.09)])
def test_a_gpu_keeps_no_large_cache_and_no_countless_steps(
    name: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)  # no copies of weights
    policy.engine.use_capture(TracedStep)
    sample_groups(policy, mixed_prompts(policy, 2))
    engine: Any = policy.engine
    kept = engine.count_kept_bytes()
    assert kept > 0
    memory = SimpleNamespace(total_memory=11 * kept)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    engine.head = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))
    for left in (kept, 0):
        engine._release_large_cache()  # noqa: SLF001
        assert engine.count_kept_bytes() == left
        monkeypatch.setattr(shared, name, limit)


def fail_to_capture(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
    """Fail like a captured step that reads from the device; ending the capture fails too."""
    step(*inputs)
    try:
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for it")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "lfm2_vl"])
def test_steps_run_eagerly_after_a_capture_that_fails(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build_family_policy(name, torch.float64, shared=True)
    prompts = [make_prompt(policy, noise_example("0", [], "What?"))]
    [eager] = sample_groups(policy, prompts, group_size=2, length=5)
    policy.engine.use_capture(fail_to_capture)
    for _ in range(2):
        [found] = sample_groups(policy, prompts, group_size=2, length=5)
        for a, b in zip(found, eager, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
    [record] = [r for r in caplog.records if r.name == shared.logger.name]
    assert record.getMessage() == (
        "decode steps run eagerly from now on, which takes longer: they cannot be captured as CUDA "
        "graphs (RuntimeError: operation not permitted when stream is capturing); "
        "rollout.cuda_graphs=false does not try"
    )
    assert policy.describe_engine().endswith("run eagerly")


def test_a_capture_without_memory_or_of_a_wrong_step_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy("qwen2_5_vl")

    def run_out(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    prompts = mixed_prompts(policy, 2)
    policy.engine.use_capture(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        sample_groups(policy, prompts)
    assert policy.describe_engine().endswith("as CUDA graphs")  # the next ones may fit

    def refuse(*arguments: Any) -> None:
        raise TypeError("a wrong step")

    policy.engine.use_capture(TracedStep)
    monkeypatch.setattr(shared, "DecodeAttention", refuse)
    with pytest.raises(TypeError, match="a wrong step"):
        sample_groups(policy, prompts)
    assert not caplog.records
