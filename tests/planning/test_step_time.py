"""Tests of the FLOPs against PyTorch's counter, and of the seconds on known devices."""

from dataclasses import replace

import pytest
import torch
from family_policies import POLICIES, build_batch, build_policy, build_prompt
from small_shapes import SHAPE, WORK
from tiny_models import FAMILIES, tiny_policy
from torch.utils.flop_counter import FlopCounterMode

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.planning import step_time
from vlm_grpo.planning.devices import Device
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import Workload
from vlm_grpo.planning.step_time import PhaseCosts, count_flops, count_token_flops
from vlm_grpo.types import Completion, Group


def test_flops_of_the_repeated_form_match_pytorchs_counter():
    policy = tiny_policy("qwen2_vl", shared=False, dtype=torch.bfloat16)
    prompt = build_prompt(policy)
    shape = read_model_shape(policy.model.config, PolicySettings(engine="repeated"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy.score(build_batch(prompt))
    patches = len(prompt.vision["pixel_values"])
    # Three completions of 5 tokens, and nothing else: a step whose rollout costs nothing.
    work = Workload(3, 1, len(prompt.token_ids), patches, 5, 1 << 16, 1 << 16, 0, copies=3)
    flops = count_flops(shape, work)
    scoring = 3 * 5 * 2 * shape.text.hidden * shape.text.vocabulary
    forward = (flops.update - 4 * scoring) / 3  # without the two passes backward
    vision = 3 * step_time.count_vision_flops(shape, patches)
    assert flops.vision == pytest.approx(vision * (1 + 3))  # rollout, update with its gradient
    assert counter.get_total_flops() == pytest.approx(forward + vision + scoring, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
# Only bfloat16: PyTorch's counter does not know oneDNN's products in float32.
@pytest.mark.parametrize("name", ["lora-bfloat16", "full-bfloat16"])
def test_flops_of_a_gradient_step_match_pytorchs_counter(family, name):
    """It does not count products in the CPU's fused attention, a few percent of the total here; the
    estimate leaves out the deepstack mergers of Qwen3."""
    policy, policy_settings = build_policy(family, POLICIES[name])
    shape = read_model_shape(policy.model.config, policy_settings)
    prompt = build_prompt(policy)
    batch = build_batch(prompt)
    with FlopCounterMode(display=False) as counter:
        policy.score(batch).logprobs.sum().backward()
    completions = tuple(Completion(c, (), "", "eos", ()) for c in batch.completions)
    flops = step_time.count_step_flops(
        shape, [Group(prompt, completions, ())], batch.slices, iterations=2
    )
    encoding = 0.0 if shape.trains_vision else flops.vision  # a frozen tower is run by the score
    assert counter.get_total_flops() == pytest.approx(flops.update / 2 + encoding, rel=0.15)
    rollout = step_time.count_vision_flops(shape, len(prompt.vision["pixel_values"]))
    rollout += count_token_flops(shape, 0, len(prompt.token_ids))
    assert flops.vision + flops.prefill == rollout


# A prompt of 20 tokens, and 4 tokens after it: two layers, in each 2 · 576 of products and 4 · 8 of
# attention to 10.5 and 22.5 tokens. The head: 2 · 8 · 100.
PROMPT, ANSWER, HEAD = 2 * 20 * (1152 + 32 * 10.5), 2 * 4 * (1152 + 32 * 22.5), 1600
# 16 patches: three blocks of 112 weights, 20 of the embedding, attention of width 4 to 16 patches;
# the merger takes 4 patches of width 4 to 16 and then 8.
TOWER = 16 * (2 * (3 * 112 + 20) + 4 * 4 * 3 * 16) + 2 * 16 * (16 + 8) * 4
FORWARD = 2 * PROMPT + 6 * ANSWER


@pytest.mark.parametrize(
    ("model", "work", "expected"),
    [
        ({}, {}, (4 * 2 * TOWER, 3 * FORWARD + 4 * 30 * HEAD)),
        ({"trains_vision": False}, {}, (2 * TOWER, 3 * FORWARD + 4 * 30 * HEAD)),
        ({"head_frozen": True}, {}, (4 * 2 * TOWER, 3 * FORWARD + 2 * 30 * HEAD)),
        ({"checkpointing": "full"}, {}, (5 * 2 * TOWER, 4 * FORWARD + 4 * 30 * HEAD)),
        # A reference, a teacher of the same size, two other passes, and two updates.
        (
            {},
            {"uses_reference": True, "teacher_weights": 3000, "extra_passes": 2, "iterations": 2},
            ((4 + 6) * 2 * TOWER, (6 + 4) * FORWARD + (8 + 4) * 30 * HEAD),
        ),
        # Old log-probabilities of the second of two mini-batches.
        ({}, {"mini_batches": 2}, (4 * 2 * TOWER, 3.5 * FORWARD + 4.5 * 30 * HEAD)),
    ],
)
def test_each_term_of_the_flops_is_counted_once(model, work, expected):
    vision, update = expected
    flops = count_flops(replace(SHAPE, **model), replace(WORK, **work))
    assert flops == PhaseCosts(vision, 2 * PROMPT, 6 * (ANSWER + 5 * HEAD), update)


def test_an_episodes_results_are_passed_and_encoded():
    # One result of 5 tokens and 4 patches in each of six episodes; answers attend to it, too.
    result, answer = 2 * 5 * (1152 + 32 * 23), 2 * 4 * (1152 + 32 * 27.5)
    tower = 4 * (2 * (3 * 112 + 20) + 4 * 4 * 3 * 4) + 2 * 16 * (16 + 8)
    found = count_flops(SHAPE, replace(WORK, results=1, result_tokens=5, result_patches=4))
    forward = 2 * PROMPT + 6 * (result + answer)
    # The second turn begins with the prompts, half of each episode's 5 tokens, and the result.
    again = 2 * PROMPT + 6 * 2 * 7 * (1152 + 32 * 24)
    assert found == PhaseCosts(
        4 * (2 * TOWER + 6 * tower),
        2 * PROMPT + again,
        6 * (answer + 5 * HEAD),
        3 * forward + 4 * 30 * HEAD,
    )


def test_adapters_add_their_products_and_prompts_with_noise_are_encoded_and_passed_too():
    # Inputs and outputs of a layer's matrices: 16 + 12 + 12 + 16 + 3 · 24.
    adapted = replace(SHAPE, lora_rank=3)
    assert count_token_flops(adapted, 0, 20) == PROMPT + 2 * 20 * 2 * 3 * 128
    assert count_flops(adapted, WORK).update == pytest.approx(
        2 * (FORWARD + 64 * 2 * 2 * 3 * 128) + 4 * 30 * HEAD
    )
    plain, noisy = (count_flops(SHAPE, replace(WORK, views=views)) for views in (1, 2))
    assert noisy == replace(plain, vision=plain.vision + 2 * TOWER, prefill=2 * plain.prefill)


def test_decoding_takes_the_longest_of_reading_computing_and_launching():
    decoding = 6 * (ANSWER + 5 * HEAD)
    # Five times: weights of two layers and of the head, keys and values of two prompts of 20 tokens
    # with 3 · 5 / 2 on average.
    read = 5 * (2 * 576 + 800 + 2 * 2 * 4 * 2 * 27.5) * 2
    for bandwidth, rate, layer, expected in (
        (10.0, 1e12, 0.0, read / 10),
        (1e12, 1000.0, 0.0, decoding / (1000 * 0.4)),
        (1e12, 1e12, 3.0, 5 * 2 * 3.0),
    ):
        rates = {"float32": 1.0, "bfloat16": rate}
        device = Device("d", 1, rates, bandwidth, layer)
        seconds, flops = step_time.estimate_seconds(SHAPE, WORK, device), count_flops(SHAPE, WORK)
        computed = {n: getattr(flops, n) / (0.4 * rate) for n in ("vision", "prefill", "update")}
        assert vars(seconds) == pytest.approx({**computed, "decode": expected})
