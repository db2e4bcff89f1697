"""The comparison of a server's prompt with the trainer's."""

from collections.abc import Sequence

from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Prompt


def check_prompt(policy: Policy, prompt: Prompt, found: Sequence[int]) -> None:
    """Refuse a server whose prompt has other tokens than ours, and name the likely cause."""
    ours = list(prompt.token_ids)
    if ours == found:
        return
    name = prompt.example.name
    images = set(policy.family.media_tokens(policy.processor))
    counts = [sum(token in images for token in tokens) for tokens in (ours, found)]
    if counts[0] != counts[1]:
        raise UserError(
            f"{name}: its images have {counts[0]} tokens here and {counts[1]} in the vLLM server: "
            "the two resize images differently; start the server by vlm-grpo serve with the "
            "same policy.min_pixels and policy.max_pixels"
        )
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, found, strict=False)) if a != b),
        min(len(ours), len(found)),
    )
    raise UserError(
        f"{name}: the vLLM server's prompt differs from token {place} on "
        f"({policy.tokenizer.decode(found[place : place + 5])!r} instead of "
        f"{policy.tokenizer.decode(ours[place : place + 5])!r}): it has another tokenizer; start "
        "it with the run's model, and compare the versions of transformers"
    )
