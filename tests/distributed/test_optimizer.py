"""The optimizer's groups, its schedule, and its state by the names of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.optimizer import (
    build_optimizer,
    build_schedule,
    build_scheduler,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rates,
    state_by_weight,
)
from vlm_grpo.errors import UserError

Named = list[tuple[str, nn.Parameter]]


def make_weights() -> Named:
    return [("norm", nn.Parameter(torch.ones(3))), ("linear", nn.Parameter(torch.ones(2, 3)))]


def make_optimizer(weights: Named, **optim: Any) -> torch.optim.AdamW:
    return build_optimizer([weight for _, weight in weights], OptimSettings(**optim))


def make_settings(optim: dict[str, Any], **values: Any) -> Settings:
    return load_settings("quickstart", optim=optim, **values)


def make_state(weights: Named) -> dict[str, Tensor]:
    """Return the state of an optimizer after one step."""
    optimizer = make_optimizer(weights)
    for number, (_, weight) in enumerate(weights, 1):
        weight.grad = torch.full_like(weight, float(number))
    optimizer.step()
    return optimizer_tensors(optimizer, weights)


def test_weights_decay_only_in_matrices() -> None:
    weights = make_weights()
    optimizer = make_optimizer(weights, weight_decay=0.1)
    decays = {
        id(weight): group["weight_decay"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert {name: decays[id(weight)] for name, weight in weights} == {"norm": 0.0, "linear": 0.1}
    assert optimizer.defaults["fused"]  # one kernel for all weights


def test_state_is_named_by_weight_and_key() -> None:
    state = make_state(make_weights())
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert set(state) == {f"{name}/{key}" for name in ("norm", "linear") for key in keys}
    assert state["linear/exp_avg"].shape == (2, 3)
    assert state["norm/exp_avg"].tolist() == pytest.approx([0.1] * 3)  # (1 − β₁) · 1
    assert state["linear/exp_avg"].flatten().tolist() == pytest.approx([0.2] * 6)


@pytest.mark.parametrize("order", [1, -1])
def test_state_is_loaded_by_name_in_any_order(order: int) -> None:
    """The optimizer numbers matrices before vectors, in whatever order the weights are named."""
    state = make_state(make_weights())
    weights = make_weights()[::order]
    optimizer = make_optimizer(weights)
    load_optimizer_tensors(optimizer, weights, dict(reversed(state.items())))
    loaded = optimizer_tensors(optimizer, weights)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_state_from_before_the_first_update_is_empty() -> None:
    weights = make_weights()
    optimizer = make_optimizer(weights)
    assert optimizer_tensors(optimizer, weights) == {}
    load_optimizer_tensors(optimizer, weights, {})
    assert optimizer_tensors(optimizer, weights) == {}


def test_state_of_other_weights_is_refused() -> None:
    state = make_state(make_weights())
    shapes = {name: weight.shape for name, weight in make_weights()}
    assert set(dict(state_by_weight(state, shapes))["norm"]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(UserError, match=r"optimizer state norm/.* fits no weight"):
        dict(state_by_weight(state, {"linear": shapes["linear"]}))
    with pytest.raises(UserError, match=r"linear/exp_avg of shape \[2, 3\] fits no weight"):
        dict(state_by_weight(state, {**shapes, "linear": torch.Size([3, 2])}))
    with pytest.raises(UserError, match=r"no optimizer state for 1 of the weights .* head:"):
        dict(state_by_weight(state, {**shapes, "head": torch.Size([4])}))


def test_only_the_state_of_one_weight_at_a_time_is_read() -> None:
    state, read = make_state(make_weights()), list[str]()

    class Recorded(dict[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            read.append(key)
            return super().__getitem__(key)

    weights = state_by_weight(Recorded(state), {n: weight.shape for n, weight in make_weights()})
    name, _ = next(weights)
    assert sorted(read) == [f"{name}/{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert len(list(weights)) == 1
    assert sorted(read) == sorted(state)


def test_settings_override_the_rates_of_a_checkpoint() -> None:
    """A resume with another learning rate continues the schedule with it."""
    old: dict[str, Any] = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 0, "max_steps": 4}
    new = {**old, "lr": 4e-3, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizer = make_optimizer(make_weights(), **old)
    scheduler = build_scheduler(optimizer, make_settings(old))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([7.5e-3] * 2)  # 3/4 of 1e-2
    set_rates(optimizer, scheduler, make_settings(new))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3e-3] * 2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        ((0.8, 0.9), 1e-6)
    }
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([2e-3] * 2)  # 2/4 of 4e-3


def test_a_warmup_may_be_a_share_and_the_rate_may_end_above_0() -> None:
    optim = {"lr": 1e-2, "max_steps": 11, "warmup_steps": 0.19}
    rate = build_schedule(make_settings({**optim, "schedule": "linear"}))
    assert [rate(step) for step in (0, 1, 3, 4, 11)] == pytest.approx(
        [0, 1e-2 / 3, 1e-2, 7 / 8 * 1e-2, 0]  # three steps of warmup, as in transformers
    )
    least = {"schedule": "cosine_with_min_lr", "min_lr": 2e-3}
    rate = build_schedule(make_settings({**optim, **least}))
    assert [rate(step) for step in (3, 7, 11)] == pytest.approx([1e-2, 6e-3, 2e-3])
