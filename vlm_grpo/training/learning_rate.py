"""The learning rates of the steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from vlm_grpo.config.methods import WarmStartSettings
from vlm_grpo.config.optim import OptimSettings, count_warmup
from vlm_grpo.config.run import Settings


def build_scheduler(optimizer: Optimizer, settings: Settings) -> Any:
    """Build the learning-rate schedule, advanced once per training step."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # the schedule returns learning rates, not shares of one
    return LambdaLR(optimizer, _build_schedules(optimizer, settings))


def _build_schedules(optimizer: Optimizer, settings: Settings) -> list[Callable[[int], float]]:
    return [build_schedule(settings, group["part"]) for group in optimizer.param_groups]


def build_schedule(settings: Settings, part: str = "") -> Callable[[int], float]:
    """Build a function that returns the learning rate of a step of the run for a part of the model.

    The schedule of the supervised steps, which have one rate for all parts, ends with them; that of
    ``optim`` begins after them.
    """
    optim, start, first = settings.optim, settings.warm_start, settings.supervised_steps
    peak = optim.part_rates.get(part, optim.lr)
    rate = _build_rate(optim, peak, optim.max_steps - first)
    if start is None:
        return rate
    supervised = _build_rate(start, start.lr, first)
    return lambda step: supervised(step) if settings.is_supervised(step) else rate(step - first)


def _build_rate(
    block: OptimSettings | WarmStartSettings, peak: float, steps: int
) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=block.lr)
    warmup, name = count_warmup(block.warmup_steps, steps), block.schedule
    least = {"min_lr": block.min_lr} if isinstance(block, OptimSettings) and block.min_lr else None
    scheduler: Any = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=least)
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * factor(step)


def set_rates(optimizer: Optimizer, scheduler: Any, settings: Settings) -> None:
    """Override the learning rates restored from a checkpoint with those of the settings."""
    schedules = _build_schedules(optimizer, settings)
    for group, rate in zip(optimizer.param_groups, schedules, strict=True):
        group |= {"initial_lr": 1.0, "lr": rate(scheduler.last_epoch)}
    scheduler.base_lrs = [1.0] * len(schedules)
    scheduler.lr_lambdas = schedules


def get_rates(scheduler: Any) -> dict[str, float]:
    """Return the metric ``learning_rate``, and one for each part that has its own."""
    groups = scheduler.optimizer.param_groups
    own = {f"learning_rate/{group['part']}": group["lr"] for group in groups if group["part"]}
    return {"learning_rate": groups[0]["lr"], **own}
