"""The shared form equals the repeated form and transformers, with images and clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from family_models import BUILDERS
from family_policies import build_family_policy, make_batch, score_alone
from gradients import relative_distance, use_float64, use_float64_recurrence
from tiny_models import (
    FAMILIES,
    add_lora,
    make_prompt,
    mixed_prompts,
    noise_clip,
    noise_example,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)
from torch import Tensor
from varlen_kernel import use_plain_varlen

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.prompt_sizes import PromptCounter
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.methods import build_methods
from vlm_grpo.training.rollout import select_usable
from vlm_grpo.types import Example, Prompt
from vlm_grpo.utils.chat import Turn

EXAMPLES = [
    noise_example("one image", [(60, 90)], seed=1),
    noise_example("no image", [], "Hello there"),
    noise_example("two images", [(56, 56), (120, 40)], "Compare these two?", seed=2),
]
CHAT = replace(
    noise_example("chat", [(60, 40), (28, 56), (84, 28)], "Or like <image>?", seed=4),
    history=(
        Turn("system", "Be brief."),
        Turn("user", "Is <image> like <image>"),
        Turn("assistant", "Yes."),
    ),
)
IMAGE = noise_example("i", [(56, 84)], seed=3).images[0]
CLIPS = [
    Example("odd", (noise_clip("c", (60, 40), 5, seed=1),), "When?", 0),  # half a last pair
    Example("mixed", (IMAGE, noise_clip("d", (56, 90), 4, seed=2)), "<image> in <image>?", 0),
    Example("clips", (noise_clip("e", (28, 56), 2), noise_clip("f", (84, 28), 6)), "Which?", 0),
    # 40 seconds: in Qwen2.5-VL, its last frames have larger positions than the text behind it.
    Example("long", (noise_clip("l", (28, 28), 20, seed=4, fps=0.5),), "?", 0),
]
# Unequal lengths; a completion of a single token feeds nothing.
LENGTHS = ((3, 7, 1), (5, 5), (1, 2, 9, 4), (2, 3), (4,), (1, 5), (3, 3))


def make_micro_batch(policy: Policy, needs_images: bool = False) -> MicroBatch:
    """Build prompts with images and without, and with clips where the family accepts them."""
    generator = torch.Generator().manual_seed(3)
    slices, row = [], 0
    for example, lengths in zip((*EXAMPLES, *CLIPS), LENGTHS, strict=True):
        if (needs_images and not example.images) or (
            example in CLIPS and not policy.family.takes_videos
        ):
            continue
        prompt = make_prompt(policy, example)
        tokens = [
            tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
            for length in lengths
        ]
        rows = tuple(range(row, row + len(lengths)))
        slices.append(GroupSlice(prompt, tuple(tokens), rows))
        row += len(lengths)
    return MicroBatch(tuple(slices))


def score_with_gradients(
    policy: Policy, needs_images: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of the batch, and the gradient of a weighted sum of them."""
    policy.model.train()
    logprobs = policy.score(make_micro_batch(policy, needs_images)).logprobs
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    (logprobs * weights).sum().backward()
    grads = {n: w.grad for n, w in policy.trainable_parameters() if w.grad is not None}
    return logprobs.detach(), grads


def with_lora(policy: Policy) -> None:
    add_lora(policy, ["q_proj", "v_proj", "down_proj"])


def with_checkpointing(policy: Policy) -> None:
    enable_gradient_checkpointing(policy.model)


def with_recomputed_mlp(policy: Policy) -> None:
    enable_gradient_checkpointing(policy.model, "mlp")


CHANGES = {
    "none": (),
    "lora": (with_lora,),
    "checkpointing": (with_checkpointing,),
    "mlp": (with_recomputed_mlp,),
    "both": (with_checkpointing, with_lora),
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_repeated_in_float32(family: str, changes: str) -> None:
    results = []
    for is_shared in (True, False):
        policy = tiny_policy(family, is_shared)
        for change in CHANGES[changes]:
            change(policy)
        results.append(score_with_gradients(policy))
    (logprobs, grads), (expected, expected_grads) = results
    # float32 through three layers
    assert (logprobs - expected).abs().max() < 1e-5
    assert relative_distance(grads, expected_grads) < 1e-5


# Mllama's layers over images cannot share a prompt.
@pytest.mark.parametrize("family", sorted({*FAMILIES, *BUILDERS} - {"mllama"}))
def test_merged_attention_and_one_kernel_equal_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(shared: bool) -> Policy:
        return build_family_policy(family, torch.float64, shared=shared, banned=())

    plain, merged, in_one = build(False), build(True), build(True)
    use_float64(monkeypatch, plain.model)
    needs_images = family.startswith("paligemma")
    expected, expected_grads = score_with_gradients(plain, needs_images)
    results = [score_with_gradients(merged, needs_images)]
    use_plain_varlen(monkeypatch)
    results.append(score_with_gradients(in_one, needs_images))
    for logprobs, grads in results:
        assert (logprobs - expected).abs().max() < 1e-12
        assert relative_distance(grads, expected_grads) < 1e-12


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5", "gemma3", "internvl"])
def test_a_chat_with_images_between_its_texts_equals_plain_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Positions on three axes, recurrent layers, images that see themselves, and one tower pass.
    policy = build_family_policy(name, torch.float64, shared=True, banned=())
    plain = build_family_policy(name, torch.float64, banned=())
    for model in (policy.model, plain.model):
        use_float64_recurrence(monkeypatch, model)
    prompt = make_prompt(policy, CHAT)
    assert "<|im_start|>assistant\nYes.<|im_end|>" in prompt.text
    batch = make_batch([prompt])
    with torch.no_grad():
        found = policy.score(batch).logprobs
        alone = [score_alone(plain.model, prompt, tokens) for tokens in batch.completions]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-9)


def build_prompts(policy: Policy, examples: Sequence[Example]) -> list[Prompt]:
    return [make_prompt(policy, example) for example in examples]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_sample_as_generate_and_score_what_they_sampled(family: str) -> None:
    tokens = []
    for shared in (True, False):
        policy = tiny_policy(family, shared, torch.float64)
        prompts = [*build_prompts(policy, CLIPS), *mixed_prompts(policy, 4)]
        groups = sample_groups(policy, prompts)  # without sharing, by transformers' generate
        tokens.append([[c.token_ids for c in group] for group in groups])
        with torch.no_grad():
            scored = policy.score(pack_groups(prompts, groups)).logprobs
        assert (scored - sampled_logprobs(groups)).abs().max() < 1e-6
    assert tokens[0] == tokens[1]


def test_a_clip_is_encoded_once_per_group() -> None:
    policy = tiny_policy("qwen2_5_vl")
    prompts = build_prompts(policy, [*CLIPS[:3], EXAMPLES[1]])
    assert [prompt.image_decodes for prompt in prompts] == [1, 2, 2, 0]
    groups = sample_groups(policy, prompts, group_size=5)
    assert policy.counters.encoder_passes == 5  # four clips and an image, for 20 completions
    policy.counters.encoder_passes = 0
    policy.score(pack_groups(prompts, groups))
    assert policy.counters.encoder_passes == 5  # with gradient, once more


def test_other_families_refuse_videos() -> None:
    policy = build_family_policy("internvl", torch.float32)
    with pytest.raises(UserError, match="example odd: it has a video, which only Qwen2-VL"):
        make_prompt(policy, CLIPS[0])


SERVERS = ["rollout.sampler=vllm", "rollout.vllm.urls=[http://127.0.0.1:9]"]


@pytest.mark.parametrize(
    "overrides",
    [SERVERS, ["rollout.noise.strength=400"], ["objective.perception.kl_coef=0.01"]],
)
def test_methods_without_videos_refuse_them_before_the_run(overrides: list[str]) -> None:
    settings, policy = load_settings("quickstart", overrides), tiny_policy("qwen2_vl")
    with pytest.raises(UserError, match=r"example odd: (rollout|objective)\.[a-z=]* does not sup"):
        select_usable(policy, CLIPS, PlainQuestion(), settings, build_methods(settings))


@pytest.mark.parametrize(("family", "overrides"), [("qwen2_vl", []), ("qwen3_vl", SERVERS)])
def test_videos_are_taken_where_they_are_supported(family: str, overrides: list[str]) -> None:
    policy, settings = tiny_policy(family), load_settings("quickstart", overrides)
    assert len(select_usable(policy, CLIPS, PlainQuestion(), settings, {})) == len(CLIPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pixels_of_a_clip_are_bounded_and_its_tokens_counted(family: str) -> None:
    policy = tiny_policy(family)
    assert policy.budget is not None
    policy.prompts.budget = replace(policy.budget, video_pixels=12 * 64 * 64)
    clip = Example("large", (noise_clip("g", (300, 300), 12), IMAGE), "?", 0)
    resized = policy.prompts.with_resized_sizes(clip).images
    assert resized[0].resized_size in [(56, 56), (64, 64)]  # whole tokens
    assert resized[1].resized_size in [(56, 84), (64, 96)]
    examples = [clip, *EXAMPLES, *CLIPS]
    counted = PromptCounter(examples, PlainQuestion(), policy.prompts)
    prompts = build_prompts(policy, examples)
    tokens = [size.tokens for size in counted.count(policy.prompts.budget)]
    assert tokens == sorted(len(prompt.token_ids) for prompt in prompts)
