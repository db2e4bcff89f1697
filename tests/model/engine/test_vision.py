"""Micro-batches that share an image share its pass through a trained vision tower."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from family_policies import read_gradient
from gpu_standins import use_plain_varlen
from gradients import relative_distance
from tiny_models import FAMILIES, make_prompt, noise_example, pack_tokens, tiny_policy
from torch import Tensor

from vlm_grpo.model.engine import vision as vision_module
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch, pack
from vlm_grpo.model.engine.vision import DetachedFeatures, split_passes
from vlm_grpo.model.families.family import ImageFeatures
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import ImageRef


def make_slices(policy: Policy) -> list[GroupSlice]:
    """Build two prompts about one image and one about another, three completions each."""
    first = noise_example("a", [(60, 90)], "What is this?", seed=1)
    second = replace(first, id="b", question="How many are there?")
    examples = [first, second, noise_example("c", [(56, 56)], seed=2)]
    prompts = [make_prompt(policy, example) for example in examples]
    own = [(tuple(range(9 + index, 20 + index)),) * 3 for index in range(3)]
    return list(pack_tokens(prompts, own).slices)


def compute_gradient(policy: Policy, batches: list[MicroBatch], share: bool) -> tuple[dict, int]:
    """Return the gradient of the summed log-probs, and the number of encoder passes."""
    policy.model.zero_grad()
    policy.counters.encoder_passes = 0
    with policy.engine.share_image_passes() if share else nullcontext(lambda _: None) as finish:
        for count, micro in enumerate(batches, 1):
            policy.score(micro).logprobs.sum().backward()
            finish({image for later in batches[count:] for image in later.images})
    return read_gradient(policy), policy.counters.encoder_passes


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_encoder_passes_does_not_change_the_gradient(family):
    policy = tiny_policy(family, dtype=torch.float64)
    first, second, third = slices = make_slices(policy)
    expected, _ = compute_gradient(policy, [MicroBatch(tuple(slices))], share=False)
    split = pack(slices, 60)
    assert len(split) >= 6  # groups of three are split, too
    # The first of these has both images; the other needs one of them.
    uneven = [MicroBatch((first, third)), MicroBatch((second,))]
    for batches in (split, uneven):
        found, passes = compute_gradient(policy, batches, share=True)
        assert passes == 2 < compute_gradient(policy, batches, share=False)[1]  # two images
        assert any(name.startswith("model.visual") for name in found)
        # float64, but transformers computes norms in float32: 1e-7 of rounding per layer.
        assert relative_distance(found, expected) < 1e-6


def test_outputs_of_a_frozen_part_have_no_gradient():
    weight = torch.ones(2, requires_grad=True)
    features = ImageFeatures(weight[None] * 3, common={"table": torch.ones(1, 2)})
    unit = (ImageRef("a.png", (4, 4), (4, 4)),)
    detached = DetachedFeatures({unit: features})
    leaf = detached.leaves[unit]
    (leaf.embeds * leaf.common["table"]).sum().backward()
    detached.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def test_images_are_encoded_in_passes_of_limited_size(monkeypatch):
    monkeypatch.setattr(vision_module, "ENCODER_PATCHES", 6)
    images = [{"pixel_values": torch.zeros(patches, 1)} for patches in (3, 3, 3, 7, 2, 4)]
    sizes = [[len(image["pixel_values"]) for image in part] for part in split_passes(images)]
    assert sizes == [[3, 3], [3], [7], [2, 4]]


@pytest.mark.parametrize("in_one_kernel", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_equals_transformers(family, in_one_kernel, monkeypatch):
    """Images whose windows have many sizes, forward and gradient."""
    if in_one_kernel:
        use_plain_varlen(monkeypatch)
    features, grads = [], []
    for shared in (True, False):
        policy = tiny_policy(family, shared, torch.float64)
        sizes = [(56, 56), (330, 200), (200, 120)]
        images = policy.family.split_images(make_prompt(policy, noise_example("a", sizes)))
        if shared:
            found = policy.family.encode_images(policy.model, images)
            levels = zip(*((image.embeds, *image.deepstack) for image in found), strict=True)
            rows = [torch.cat(level) for level in levels]
        else:
            inputs = [torch.cat([i[key] for i in images]) for key in images[0]]
            output = policy.model.model.get_image_features(*inputs, return_dict=True)
            levels = [output.pooler_output, *getattr(output, "deepstack_features", [])]
            # transformers 5.17 does not split the later levels by image.
            rows = [x if isinstance(x, Tensor) else torch.cat(x) for x in levels]
        features.append(torch.stack(rows))
        features[-1].sin().sum().backward()
        tower = policy.model.model.visual.named_parameters()
        grads.append({name: weight.grad for name, weight in tower})
    assert (features[0] - features[1]).abs().max() < 1e-12
    assert relative_distance(*grads) < 1e-12
