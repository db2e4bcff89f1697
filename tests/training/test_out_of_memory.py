"""The number of tokens at once after memory has run out."""

from vlm_grpo.training.out_of_memory import TokenBudget


def test_a_budget_is_halved_from_what_was_used(caplog):
    budget = TokenBudget(1000, "optim.max_tokens_per_batch")
    budget.halve(used=300)
    assert budget.tokens == 150
    assert "set optim.max_tokens_per_batch=150 to start with this value" in caplog.text
    budget.halve(used=300)  # more than the budget: a single completion
    assert budget.tokens == 75
    budget.halve(used=75, minimum=60)
    assert budget.tokens == 60
