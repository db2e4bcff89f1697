"""The repeated form samples the tokens of the shared form."""

from __future__ import annotations

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
