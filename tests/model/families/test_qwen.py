"""Image processing of the Qwen-VL families."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_prompt, noise_example, tiny_policy

from vlm_grpo.types import Example, Prompt


def test_a_small_image_does_not_change_the_size_of_the_others() -> None:
    policy = tiny_policy("qwen2_5_vl")
    small = noise_example("small", [(10, 12)], seed=4)
    large = noise_example("large", [(112, 84)], seed=5)

    def make_prompts(*examples: Example) -> list[Prompt]:
        return [make_prompt(policy, example) for example in examples]

    before = make_prompts(large)[0]
    after = make_prompts(small, large)[1]
    assert before.token_ids == after.token_ids
    assert torch.equal(before.vision["pixel_values"], after.vision["pixel_values"])
    # 10 × 12 pixels become one 28 × 28 token; 112 × 84 are 4 × 3 tokens.
    grids = [p.vision["image_grid_thw"].tolist() for p in make_prompts(small, large)]
    assert grids == [[[1, 2, 2]], [[1, 6, 8]]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_truncated_inside_an_image_is_refused(family: str) -> None:
    policy = tiny_policy(family)
    prompt = make_prompt(policy, noise_example("a", [(56, 56)]))
    image = policy.model.config.image_token_id
    first = prompt.token_ids.index(image)
    features = policy.family.encode_images(policy.model, policy.family.split_images(prompt))
    tokens = np.array([prompt.token_ids[: first + 1]])
    positions = torch.zeros(3, 1, first + 1, dtype=torch.long)
    with pytest.raises(ValueError, match="has 1 image tokens but its images have 4 features"):
        policy.family.run(policy.model, tokens, positions, features, None)
