"""The shared form equals the repeated form; plausible but wrong variants of it do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_models import BUILDERS
from family_policies import build_family_policy, make_batch, score_alone
from float64_steps import use_float64, use_float64_recurrence
from gradients import relative_distance
from tiny_models import (
    FAMILIES,
    add_lora,
    make_prompt,
    noise_clip,
    noise_example,
    tiny_policy,
)
from torch import Tensor
from varlen_kernel import use_plain_varlen

from vlm_grpo.model.engine import kernels, shared
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import PackedAttention
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.engine.shared import PackedRow, PrefixInputs
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Example
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


def assert_forms_are_equal(
    family: str, dtype: torch.dtype, bound: float, grad_bound: float, changes: Any = ()
) -> None:
    results = []
    for is_shared in (True, False):
        policy = tiny_policy(family, is_shared, dtype)
        for change in changes:
            change(policy)
        results.append(score_with_gradients(policy))
    (logprobs, grads), (expected, expected_grads) = results
    assert (logprobs - expected).abs().max() < bound
    assert relative_distance(grads, expected_grads) < grad_bound


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_repeated_in_float32(family: str, changes: str) -> None:
    # float32 through three layers
    assert_forms_are_equal(family, torch.float32, 1e-5, 1e-5, CHANGES[changes])


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_repeated_in_float64(family: str) -> None:
    # transformers computes norms in float32
    assert_forms_are_equal(family, torch.float64, 1e-9, 1e-6)


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


def attend_causally(
    self: PackedAttention, layer: kernels.Layer, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    return kernels.causal(q, k, v, layer.scaling).transpose(1, 2)


INIT, PACK_ROW = PackedAttention.__init__, shared.pack_row


def join_completions(self: PackedAttention, spans: Any, masks: Any) -> None:
    """See one long completion instead of G short ones."""
    INIT(
        self,
        [GroupSpan(s.start, s.prompt_length, (sum(s.completion_lengths),)) for s in spans],
    )


def pack_with_running_positions(prefixes: Sequence[PrefixInputs], completions: Any) -> PackedRow:
    row = PACK_ROW(prefixes, completions)
    for span, prefix in zip(row.spans, prefixes, strict=True):
        first, count = span.start + span.prompt_length, sum(span.completion_lengths)
        rest = slice(first, first + count)
        row.position_ids[:, rest] = prefix.next_position + torch.arange(count)
    return row


def pack_with_previous_predictor(prefixes: Sequence[PrefixInputs], completions: Any) -> PackedRow:
    """Predict each first token from the token before it: right only for a group's first one."""
    row = PACK_ROW(prefixes, completions)
    starts = [
        span.start + span.prompt_length + torch.tensor([0, *span.completion_lengths[:-1]]).cumsum(0)
        for span in row.spans
    ]
    row.predictors[row.target_positions == 0] = torch.cat(starts) - 1
    return row


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PackedAttention, "__call__", attend_causally),
        (PackedAttention, "__init__", join_completions),
        (shared, "pack_row", pack_with_running_positions),
        (shared, "pack_row", pack_with_previous_predictor),
        # The prompt's length instead of its last position + 1.
        (PrefixInputs, "next_position", property(lambda prefix: len(prefix.token_ids))),
    ],
)
def test_plausible_variants_are_wrong_by_far_more_than_rounding(
    owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("qwen2_5_vl", dtype=torch.float64)
    batch = make_micro_batch(policy)
    with torch.no_grad():
        right = policy.score(batch).logprobs
        monkeypatch.setattr(owner, name, wrong)
        assert (policy.score(batch).logprobs - right).abs().max() > 1e-3


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_do_not_depend_on_the_rest_of_the_batch(family: str, is_shared: bool) -> None:
    policy = tiny_policy(family, is_shared)
    batch = make_micro_batch(policy)
    together = policy.score(batch).logprobs
    pieces = [*batch.slices[:-1], *batch.slices[-1].split_in_half()]
    alone = torch.cat([policy.score(MicroBatch((piece,))).logprobs for piece in pieces])
    assert (together - alone).abs().max() < 1e-5
