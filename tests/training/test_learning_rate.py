"""The learning rates of the steps, by part of the model."""

from typing import Any

import pytest
import torch
from torch import nn

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors
from vlm_grpo.errors import UserError
from vlm_grpo.training.learning_rate import build_schedule, build_scheduler, get_rates, set_rates

PARTS = {
    "model.visual.blocks.0.attn.qkv.weight": "vision",
    "model.visual.merger.mlp.0.weight": "projector",
    "model.language_model.layers.0.mlp.up_proj.weight": "language",
    "model.language_model.norm.weight": "language",
}


def make_parts() -> list[tuple[str, nn.Parameter]]:
    return [(n, nn.Parameter(torch.ones((3,) if "norm" in n else (2, 3)))) for n in PARTS]


def make_settings(optim: dict[str, Any], **values: Any) -> Settings:
    return load_settings("quickstart", optim=optim, **values)


def test_a_resumed_run_has_the_rates_of_its_settings():
    """A resume with another learning rate continues the schedule with it."""
    old: dict[str, Any] = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 0, "max_steps": 4}
    new = {**old, "lr": 4e-3, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6}
    weights = make_parts()[2:]
    optimizer = build_optimizer(weights, OptimSettings(**old))
    assert optimizer.defaults["fused"]  # one kernel for all weights
    scheduler = build_scheduler(optimizer, make_settings(old))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([7.5e-3] * 2)  # 3/4 of 1e-2
    saved, state = scheduler.state_dict(), optimizer_tensors(optimizer, weights)
    weights = make_parts()[2:]
    optimizer = build_optimizer(weights, OptimSettings(**new))
    scheduler = build_scheduler(optimizer, make_settings(new))
    load_optimizer_tensors(optimizer, weights, state)
    scheduler.load_state_dict(saved)
    set_rates(optimizer, scheduler, make_settings(new))
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
        assert group["lr"] == pytest.approx(3e-3)
        assert (group["weight_decay"], group["betas"], group["eps"]) == (decay, (0.8, 0.9), 1e-6)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([2e-3] * 2)  # 2/4 of 4e-3


def test_a_warmup_may_be_a_share_and_the_rate_may_end_above_0():
    optim = {"lr": 1e-2, "max_steps": 11, "warmup_steps": 0.19}
    rate = build_schedule(make_settings({**optim, "schedule": "linear"}))
    expected = [0, 1e-2 / 3, 1e-2, 7 / 8 * 1e-2, 0]  # three steps of warmup, as in transformers
    assert [rate(step) for step in (0, 1, 3, 4, 11)] == pytest.approx(expected)
    least = {"schedule": "cosine_with_min_lr", "min_lr": 2e-3}
    rate = build_schedule(make_settings({**optim, **least}))
    assert [rate(step) for step in (3, 7, 11)] == pytest.approx([1e-2, 6e-3, 2e-3])


def test_each_part_follows_the_schedule_from_its_own_rate_which_needs_trained_weights():
    optim: dict[str, Any] = {"lr": 1e-2, "lr_vision": 1e-3, "lr_projector": 0.0}
    optim |= {"schedule": "linear", "max_steps": 4, "name": "adafactor"}
    weights = make_parts()
    optimizer = build_optimizer(weights, OptimSettings(**optim))
    optim |= {"betas": (0.9, 0.999), "warmup_steps": 0}  # in place of the recipe's
    scheduler = build_scheduler(optimizer, make_settings(optim))
    for _, weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler.step()
    assert get_rates(scheduler) == {
        "learning_rate": pytest.approx(7.5e-3),  # 3/4 of each
        "learning_rate/vision": pytest.approx(7.5e-4),
        "learning_rate/projector": 0.0,
    }
    moved = {PARTS[name]: float((1 - weight.detach()).max()) for name, weight in weights}
    # Adafactor's first step is the learning rate times the sign of the gradient; 1e-7: float32.
    assert moved == pytest.approx({"vision": 1e-3, "projector": 0.0, "language": 1e-2}, abs=1e-7)
    supervised = make_settings(optim, warm_start={"steps": 2, "lr": 5e-2})
    for part, rate in (("vision", 1e-3), ("", 1e-2)):
        schedule = build_schedule(supervised, part)
        assert (schedule(0), schedule(2)) == pytest.approx((5e-2, rate))
    with pytest.raises(UserError, match=r"optim\.lr_vision has no effect: no weight of the vision"):
        build_optimizer(make_parts()[1:], OptimSettings(lr_vision=1e-3))
