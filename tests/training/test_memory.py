"""Memory usage and out-of-memory errors."""

from __future__ import annotations

import psutil
import pytest
import torch

from vlm_grpo.training.memory import GIB, TokenBudget, is_out_of_memory, memory_metrics


def test_a_failed_allocation_on_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 50)
    assert is_out_of_memory(failed.value)


def test_only_failed_allocations_are_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as failed:
        torch.dot(torch.ones(2), torch.ones(3))
    assert not is_out_of_memory(failed.value)


def test_a_budget_is_halved_from_what_was_used(caplog):
    budget = TokenBudget(1000, "optim.max_tokens_per_batch")
    budget.halve(used=300)
    assert budget.tokens == 150
    assert "set optim.max_tokens_per_batch=150 to start with this value" in caplog.text
    budget.halve(used=300)  # more than the budget: a single completion
    assert budget.tokens == 75
    budget.halve(used=75, minimum=60)
    assert budget.tokens == 60


def test_resident_memory_is_in_gib():
    metrics = memory_metrics(torch.device("cpu"))
    assert set(metrics) == {"memory/resident"}
    resident = psutil.Process().memory_info().rss / 2**30
    assert metrics["memory/resident"] == pytest.approx(resident, rel=0.1)


@pytest.mark.gpu
def test_the_peak_of_an_accelerator_is_reset_by_each_call():
    device = torch.device("cuda")
    memory_metrics(device)
    held = torch.zeros(GIB, dtype=torch.uint8, device=device)
    del held
    assert memory_metrics(device)["memory/cuda_peak"] >= 1
    assert memory_metrics(device)["memory/cuda_peak"] < 1
