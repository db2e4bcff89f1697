"""The repeated form samples the tokens of the shared form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, mixed_prompts, sample_groups, tiny_policy


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_sample_equal_tokens(family: str) -> None:
    tokens = []
    for shared in (True, False):
        policy = tiny_policy(family, shared, torch.float64)
        groups = sample_groups(policy, mixed_prompts(policy, 6))
        tokens.append([[c.token_ids for c in group] for group in groups])
    assert tokens[0] == tokens[1]


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
