"""The number of tokens at once after memory has run out."""

import torch

from vlm_grpo.training.out_of_memory import TokenBudget, is_out_of_memory


def test_a_budget_is_halved_from_what_was_used(caplog):
    budget = TokenBudget(1000, "optim.max_tokens_per_batch")
    budget.halve(used=300)
    assert budget.tokens == 150
    assert "set optim.max_tokens_per_batch=150 to start with this value" in caplog.text
    budget.halve(used=300)  # more than the budget: a single completion
    assert budget.tokens == 75
    budget.halve(used=75, minimum=60)
    assert budget.tokens == 60


def test_a_lack_of_memory_is_told_from_other_errors_by_its_type_or_text():
    failed = "DefaultCPUAllocator: {}: you tried to allocate 9 bytes".format
    errors = (
        RuntimeError(failed("not enough memory")),
        RuntimeError(failed("can't allocate memory")),
    )
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("CUDA"), *errors)))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
