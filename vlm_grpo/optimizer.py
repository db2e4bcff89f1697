"""AdamW over what a policy trains, and its learning rate over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from vlm_grpo.config import OptimSettings


def build_optimizer(weights: Sequence[nn.Parameter], optim: OptimSettings) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms and biases) do not."""
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, optim: OptimSettings) -> Any:
    """The learning rate's shape, one tick a step."""
    return get_scheduler(
        optim.schedule, optimizer, optim.warmup_steps, num_training_steps=optim.max_steps
    )


def set_rates(optimizer: Any, scheduler: Any, optim: OptimSettings) -> None:
    """Put the settings' values over those that came with a checkpoint's state."""
    decays = (optim.weight_decay, 0.0)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group |= {"initial_lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        group["weight_decay"] = decay
    scheduler.base_lrs = [optim.lr] * len(scheduler.base_lrs)
    rates = (factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = optim.lr * rate
