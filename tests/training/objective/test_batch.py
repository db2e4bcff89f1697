"""Sums and means by completion, active tokens, and the totals of a step."""

from __future__ import annotations

import torch

from vlm_grpo.training.objective import StepTotals, TokenBatch

LENGTHS = torch.tensor([2, 0, 3])
ACTIVE = torch.tensor([True, True, False])


def make_batch(active: torch.Tensor | None = None) -> TokenBatch:
    completion = torch.tensor([0, 0, 2, 2, 2])
    advantages = torch.tensor([1.0, 2.0, 3.0])
    return TokenBatch(torch.zeros(5), completion, advantages, LENGTHS, active=active)


def test_values_are_summed_and_averaged_by_completion():
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 7.0])
    assert make_batch().completion_sum(values).tolist() == [4, 0, 12]
    assert make_batch().completion_mean(values).tolist() == [2, 0, 4]  # 0 without tokens


def test_tokens_have_the_advantage_and_the_activity_of_their_completion():
    assert make_batch().per_token_advantages.tolist() == [1, 1, 3, 3, 3]
    assert make_batch().active_tokens.tolist() == [1] * 5
    assert make_batch(ACTIVE).active_tokens.tolist() == [1, 1, 0, 0, 0]


def test_totals_count_masked_completions_but_not_their_tokens():
    assert StepTotals.from_lengths(LENGTHS, None, 16) == StepTotals(3, 5, 16)
    assert StepTotals.from_lengths(LENGTHS, ACTIVE, 16) == StepTotals(3, 2, 16)
