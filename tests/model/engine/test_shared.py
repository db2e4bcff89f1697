"""The shared form samples as the repeated form and transformers do, with images and clips; captured
steps are kept, or given up where they fail. Its scores are compared in ``test_observations.py``."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compiled_steps import TracedStep
from family_policies import build_family_policy
from gpu_standins import use_plain_varlen
from recorded import record_calls
from tiny_models import (
    ENDS,
    FAMILIES,
    add_lora,
    assert_same_samples,
    clip_examples,
    make_prompt,
    mixed_prompts,
    noise_clip,
    noise_example,
    pack_groups,
    read_tokens,
    sample_groups,
    sampled_logprobs,
    text_prompts,
    tiny_policy,
)
from torch import Tensor

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine import shared
from vlm_grpo.model.engine.graphs import DecodeStep
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.planning.prompts import PromptCounter
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.methods import build_methods
from vlm_grpo.training.rollout import select_usable
from vlm_grpo.types import Example

CLIPS = clip_examples()


# Adapters are merged for a rollout in float32.
@pytest.mark.parametrize(
    ("family", "lora"), [("qwen2_5_vl", False), ("qwen3_vl", False), ("qwen2_5_vl", True)]
)
def test_both_forms_sample_as_generate_and_score_what_they_sampled(family, lora):
    dtype, bound = (torch.float32, 1e-4) if lora else (torch.float64, 1e-6)
    tokens = []
    for is_shared in (True, False):
        policy = tiny_policy(family, is_shared, dtype, min_new_tokens=2)
        if lora:
            add_lora(policy, ["q_proj", "down_proj"])
        before = {n: w.clone() for n, w in policy.model.state_dict().items()}
        prompts = [*(make_prompt(policy, clip) for clip in CLIPS), *mixed_prompts(policy, 6)]
        # Without sharing, by transformers' generate.
        groups = sample_groups(policy, prompts, with_entropies=True)
        tokens.append(read_tokens(groups))
        after = policy.model.state_dict()
        assert all(torch.equal(after[n], w) for n, w in before.items())
        scored = policy.score(pack_groups(prompts, groups), with_entropy=True)
        assert scored.logprobs.requires_grad  # the adapters are restored, and trained
        assert (scored.logprobs - sampled_logprobs(groups)).abs().max() < bound
        entropies = [value for group in groups for c in group for value in c.entropies]
        assert scored.entropies is not None
        assert (scored.entropies - torch.tensor(entropies)).abs().max() < bound
    assert lora or tokens[0] == tokens[1]


def test_a_clip_is_encoded_once_per_group():
    policy = tiny_policy("qwen2_5_vl")
    prompts = [*(make_prompt(policy, clip) for clip in CLIPS[:3]), *text_prompts(policy, [2])]
    assert [prompt.image_decodes for prompt in prompts] == [1, 2, 2, 0]
    groups = sample_groups(policy, prompts, group_size=5)
    assert policy.counters.encoder_passes == 5  # four clips and an image, for 20 completions
    policy.counters.encoder_passes = 0
    policy.score(pack_groups(prompts, groups))
    assert policy.counters.encoder_passes == 5  # with gradient, once more


SERVERS = ["rollout.sampler=vllm", "rollout.vllm.urls=[http://127.0.0.1:9]"]


def test_videos_are_taken_where_they_are_supported_and_refused_before_the_run_by_other_methods():
    others = "rollout.noise.strength=400", "objective.perception.kl_coef=0.01"
    policy = tiny_policy("qwen2_vl")
    for overrides in (SERVERS, *([name] for name in others), ["methods=[visual_credit]"]):
        settings = load_settings("quickstart", overrides)
        message = r"odd: (rollout|objective|visual_credit)[a-z.=]* does not sup"
        with pytest.raises(UserError, match=message):
            select_usable(policy, CLIPS, PlainQuestion(), settings, build_methods(settings))
    for family, overrides in (("qwen2_vl", []), ("qwen3_vl", SERVERS)):
        policy, settings = tiny_policy(family), load_settings("quickstart", overrides)
        assert len(select_usable(policy, CLIPS, PlainQuestion(), settings, {})) == len(CLIPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pixels_of_a_clip_are_bounded_and_its_tokens_counted(family):
    policy = tiny_policy(family)
    budget: Any = policy.budget
    policy.prompts.budget = replace(budget, video_pixels=12 * 64 * 64)
    image = noise_example("i", [(56, 84)]).images[0]
    clip = Example("large", (noise_clip("g", (300, 300), 12), image), "?", 0)
    resized = policy.prompts.with_resized_sizes(clip).images
    assert resized[0].resized_size in [(56, 56), (64, 64)]  # whole tokens
    assert resized[1].resized_size in [(56, 84), (64, 96)]
    examples = [
        clip,
        noise_example("two", [(56, 56), (120, 40)]),
        noise_example("none", []),
        *CLIPS,
    ]
    counted = PromptCounter(examples, PlainQuestion(), policy.prompts)
    tokens = [size.tokens for size in counted.count(policy.prompts.budget)]
    assert tokens == sorted(len(make_prompt(policy, each).token_ids) for each in examples)


def test_tokens_do_not_depend_on_slots_other_prompts_or_other_completions():
    """Each completion is the one with its number, whatever is sampled beside it."""
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=tuple(range(0, 256, 7)))
    prompts = mixed_prompts(policy, 7)
    expected = read_tokens(sample_groups(policy, prompts, group_size=5))
    lengths = [len(tokens) for group in expected for tokens in group]
    assert min(lengths) < max(lengths)  # completions leave the batch at different times
    numbers = [range(5), range(3, 5), range(1), range(4), range(2, 3), range(5), range(1, 4)]
    kept = [[whole[n] for n in own] for own, whole in zip(numbers, expected, strict=True)]
    settings = SamplingSettings(policy.distribution, 12)
    seeds = [(0, index) for index in range(7)]
    for max_tokens in (1, 600, 100_000):  # one slot, a few, or all at once
        assert read_tokens(policy.sample(prompts, settings, numbers, seeds, max_tokens)) == kept
    for index, prompt in enumerate(prompts[:3]):
        alone = policy.sample([prompt], settings, 5, [seeds[index]], 100_000)
        assert read_tokens(alone) == [expected[index]]


def test_batches_of_repeated_prompts_keep_to_the_budget(monkeypatch):
    policy = tiny_policy("qwen2_5_vl", shared=False)
    calls = record_calls(monkeypatch, policy.model, "generate")
    sample_groups(policy, mixed_prompts(policy, 6), max_tokens=300)
    shapes = [call.named["input_ids"].shape for call in calls]
    assert max(rows for rows, _ in shapes) > 1
    assert all(rows * (length + 12) <= 300 or rows == 1 for rows, length in shapes)  # 12 new tokens


def test_rollouts_that_fit_into_the_kept_cache_capture_no_steps_again():
    policy, eager = (tiny_policy("qwen2_5_vl", dtype=torch.float64) for _ in range(2))
    policy.engine.use_capture(TracedStep)

    def count(words: int, prompts: int, **limits: int) -> int:
        """Return the number of captures of a rollout, whose tokens must be right."""
        built = text_prompts(policy, range(words, words - prompts, -1))
        before = TracedStep.traces
        assert_same_samples(*(sample_groups(p, built, **limits) for p in (policy, eager)))
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


def test_rollouts_of_varied_lengths_need_few_captures_on_a_gpu(monkeypatch):
    """With FlashAttention a step of any length is the same; only the number of rows changes it."""
    use_plain_varlen(monkeypatch)
    monkeypatch.setattr(shared, "LENGTH_BUCKET", 4)
    policy, eager = (tiny_policy("qwen2_5_vl", dtype=torch.float64, eos=ENDS) for _ in range(2))
    captured: list[tuple[Tensor, ...]] = []
    policy.engine.use_capture(lambda step, inputs: (captured.append(inputs), step)[1])
    for words in (9, 2, 20, 5, 14):
        prompts = text_prompts(policy, range(words, words + 4))
        assert_same_samples(*(sample_groups(p, prompts, group_size=4) for p in (policy, eager)))
    assert 2 < len(captured) <= 8
    del captured[:]
    kept = vars(policy.engine)["_steps"]
    kept.clear()
    monkeypatch.setattr(shared, "KEPT_STEPS", 1)
    sample_groups(policy, prompts, group_size=4)
    assert len(kept) == 1 < len(captured)


def test_a_gpu_keeps_no_large_cache(monkeypatch):
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
        monkeypatch.setattr(shared, "KEPT_SHARE", 0.09)


def fail_to_capture(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
    """Fail like a captured step that reads from the device; ending the capture fails too."""
    step(*inputs)
    try:
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for it")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_steps_run_eagerly_after_a_capture_that_fails(caplog):
    """Recurrent states are then those of before it."""
    policy = build_family_policy("lfm2_vl", torch.float64, shared=True)
    draw = partial(sample_groups, policy, text_prompts(policy, (1,)), group_size=2, length=5)
    eager = draw()
    policy.engine.use_capture(fail_to_capture)
    for _ in range(2):
        assert_same_samples(draw(), eager)
    [record] = [r for r in caplog.records if r.name == shared.logger.name]
    assert record.getMessage() == (
        "decode steps run eagerly from now on, which takes longer: they cannot be captured as CUDA "
        "graphs (RuntimeError: operation not permitted when stream is capturing); "
        "rollout.cuda_graphs=false does not try"
    )
    assert policy.describe_engine().endswith("run eagerly")


def test_steps_that_cannot_be_compiled_are_captured(monkeypatch, caplog):
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)
    prompts = mixed_prompts(policy, 2)
    expected = sample_groups(policy, prompts)
    monkeypatch.setattr(shared, "capture_compiled", fail_to_capture)
    monkeypatch.setattr(shared, "CudaGraph", TracedStep)
    policy.engine.use_capture(fail_to_capture)
    assert_same_samples(sample_groups(policy, prompts), expected)
    assert policy.engine.capture is TracedStep
    [record] = [r for r in caplog.records if r.name == shared.logger.name]
    assert "run without torch.compile from now on" in record.getMessage()
    assert "rollout.torch_compile=false does not try" in record.getMessage()


def test_a_capture_without_memory_or_of_a_wrong_step_is_an_error_of_its_own(monkeypatch, caplog):
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
    policy.engine.use_capture(TracedStep)
    monkeypatch.setattr(shared, "DecodeAttention", Mock(side_effect=TypeError("a wrong step")))
    with pytest.raises(TypeError, match="a wrong step"):
        sample_groups(policy, prompts)
    assert not caplog.records
