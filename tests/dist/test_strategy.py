"""The gradients and the optimizer step of a strategy, in one process."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import tiny_policy

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.dist.strategy import Strategy, build_strategy


def test_the_model_is_moved_to_the_device_of_its_rank():
    """Torch's device without memory stands for an accelerator."""
    ranks: Any = SimpleNamespace(device=torch.device("meta"), num_processes=1)
    strategy = Strategy(tiny_policy("qwen2_5_vl"), ranks)
    assert {weight.device.type for _, weight in strategy.trainable} == {"meta"}


def test_weights_without_a_gradient_get_a_zero_gradient():
    """The optimizer must move them as it does if their gradient is zero: weights decay."""
    strategy = build_strategy(tiny_policy("qwen2_5_vl"), Accelerator(cpu=True))
    optim = OptimSettings(lr=0.1, weight_decay=0.1)
    strategy.attach_optimizer(build_optimizer(strategy.trainable, optim), math.inf)
    assert type(strategy) is Strategy  # of a plain launch
    with pytest.raises(RuntimeError, match="no dummy passes"):
        strategy.dummy_loss()
    (_, first), *others = strategy.trainable
    with strategy.accumulate():
        first.sum().backward()
        assert all(weight.grad is None for _, weight in others)
    assert first.grad is not None
    assert bool((first.grad == 1).all())
    for name, weight in others:
        assert weight.grad is not None, name
        assert not weight.grad.any()
    before = {name: weight.detach().clone() for name, weight in others if weight.dim() >= 2}
    strategy.step()
    for name, weight in others:
        if name in before:
            assert torch.allclose(weight, before[name] * (1 - 0.1 * 0.1), rtol=1e-6), name
