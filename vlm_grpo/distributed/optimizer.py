"""The optimizer, its learning-rate schedule, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.config.warm_start import WarmStartSettings, count_warmup
from vlm_grpo.distributed.sharding import shard_like
from vlm_grpo.errors import UserError


def build_optimizer(weights: Sequence[nn.Parameter], optim: OptimSettings) -> torch.optim.AdamW:
    """Build AdamW, with weight decay on matrices but not on vectors (norms and biases)."""
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Settings) -> Any:
    """Build the learning-rate schedule, advanced once per training step."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # the schedule returns learning rates, not shares of one
    return LambdaLR(optimizer, build_schedule(settings))


def build_schedule(settings: Settings) -> Callable[[int], float]:
    """Build a function that returns the learning rate of a step of the run.

    The schedule of the supervised steps ends with them; that of ``optim`` begins after them.
    """
    optim, start, first = settings.optim, settings.warm_start, settings.supervised_steps
    rate = _build_rate(optim, optim.max_steps - first)
    if start is None:
        return rate
    supervised = _build_rate(start, first)
    return lambda step: supervised(step) if settings.is_supervised(step) else rate(step - first)


def _build_rate(block: OptimSettings | WarmStartSettings, steps: int) -> Callable[[int], float]:
    """Build the learning rate by step of ``steps`` steps under a block's schedule."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=block.lr)
    warmup, name = count_warmup(block.warmup_steps, steps), block.schedule
    least = {"min_lr": block.min_lr} if isinstance(block, OptimSettings) and block.min_lr else None
    scheduler: Any = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=least)
    factor = scheduler.lr_lambdas[0]
    return lambda step: block.lr * factor(step)


def set_rates(optimizer: Any, scheduler: Any, settings: Settings) -> None:
    """Override the hyper-parameters restored from a checkpoint with those of the settings."""
    optim, rate = settings.optim, build_schedule(settings)
    decays = (optim.weight_decay, 0.0)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group |= {"initial_lr": 1.0, "betas": optim.betas, "eps": optim.eps}
        group |= {"weight_decay": decay, "lr": rate(scheduler.last_epoch)}
    scheduler.base_lrs = [1.0] * len(scheduler.base_lrs)
    scheduler.lr_lambdas = [rate] * len(scheduler.base_lrs)


def optimizer_tensors(
    optimizer: Any, trainable: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by ``weight/key``, such as ``….q_proj.weight/exp_avg``."""
    names = _names_in_order(optimizer, trainable)
    return {
        f"{names[index]}/{key}": value
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }


def load_optimizer_tensors(
    optimizer: Any,
    trainable: Sequence[tuple[str, nn.Parameter]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load the state that ``optimizer_tensors`` returned.

    Raises:
        UserError: the state belongs to other weights.
    """
    if not tensors:  # saved before the first update
        return
    held, shapes = dict(trainable), {name: weight.shape for name, weight in trainable}
    places = {name: index for index, name in enumerate(_names_in_order(optimizer, trainable))}
    sharded = {
        places[name]: {
            key: shard_like(value, held[name]) if value.dim() else value  # the number of updates
            for key, value in values.items()
        }
        for name, values in state_by_weight(tensors, shapes)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": sharded, "param_groups": groups})


def state_by_weight(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each weight's name and state by key, from the state of ``optimizer_tensors``.

    Only the tensors of one weight at a time are read from the mapping.

    Args:
        tensors: the state.
        shapes: full shapes of the trained weights by name.

    Raises:
        UserError: the state belongs to other weights.
    """
    keys: dict[str, list[str]] = {}
    for key in tensors:
        keys.setdefault(key.rpartition("/")[0], []).append(key)
    if missing := sorted(shapes.keys() - keys.keys()):
        raise UserError(
            f"the checkpoint holds no optimizer state for {len(missing)} of the weights that these "
            f"settings train, such as {missing[0]}: resume with the settings that wrote it"
        )
    for name, own in keys.items():
        state = {key: tensors[key] for key in own}
        for key, value in state.items():
            if name not in shapes or (value.dim() and value.shape != shapes[name]):
                raise UserError(
                    f"the checkpoint's optimizer state {key} of shape {list(value.shape)} fits no "
                    "weight that these settings train: resume with the settings that wrote it"
                )
        yield name, {key.rpartition("/")[2]: value for key, value in state.items()}


def _names_in_order(optimizer: Any, trainable: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the weights' names in the order in which the optimizer numbers them."""
    names = {id(weight): name for name, weight in trainable}
    return [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
