"""A server's prompt has the trainer's tokens, or a message names the cause."""

import pytest
from tiny_models import make_prompt, noise_example, tiny_policy

from vlm_grpo.errors import UserError
from vlm_grpo.serve.prompt_check import check_prompt


def test_prompts_with_other_tokens_are_refused():
    policy = tiny_policy("qwen2_5_vl")
    prompt = make_prompt(policy, noise_example("a", [(60, 60)], "What?"))
    ours = list(prompt.token_ids)
    check_prompt(policy, prompt, ours)
    image_token = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    place = ours.index(image_token)
    count = ours.count(image_token)
    more, changed = [*ours[:place], image_token, *ours[place:]], [*ours]
    changed[-3] += 1
    for tokens, message in (
        (more, rf"example a: its images have {count} tokens here and "),
        (changed, rf"from token {len(ours) - 3} on .* another tokenizer"),
        (ours[:-1], rf"from token {len(ours) - 1} on"),
        ([*ours, 65], rf"from token {len(ours)} on"),
    ):
        with pytest.raises(UserError, match=message):
            check_prompt(policy, prompt, tokens)
