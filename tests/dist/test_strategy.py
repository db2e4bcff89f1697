"""The gradients and the optimizer step of a strategy, in one process."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import tiny_policy
from torch import Tensor

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.dist import strategy as strategies
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.dist.strategy import DataParallel, Strategy, build_strategy


def make_strategy(max_norm: float = math.inf) -> Strategy:
    strategy = build_strategy(tiny_policy("qwen2_5_vl"), Accelerator(cpu=True))
    optim = OptimSettings(lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(strategy.trainable, optim)
    strategy.attach_optimizer(optimizer, max_norm)
    return strategy


def copy_weights(strategy: Strategy) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in strategy.trainable}


def test_the_model_is_moved_to_the_device_of_its_rank():
    """Torch's device without memory stands for an accelerator."""
    ranks: Any = SimpleNamespace(device=torch.device("meta"), num_processes=1)
    strategy = DataParallel(tiny_policy("qwen2_5_vl"), ranks)
    assert {weight.device.type for _, weight in strategy.trainable} == {"meta"}


def test_weights_without_a_gradient_get_a_zero_gradient():
    """The optimizer must move them as it does if their gradient is zero: weights decay."""
    strategy = make_strategy()
    assert isinstance(strategy, DataParallel)  # of a plain launch
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
    before = copy_weights(strategy)
    strategy.step()
    matrices = [name for name, weight in others if weight.dim() >= 2]
    after = copy_weights(strategy)
    for name in matrices:
        assert torch.allclose(after[name], before[name] * (1 - 0.1 * 0.1), rtol=1e-6), name


def test_a_gradient_that_is_not_finite_changes_no_weight():
    strategy = make_strategy(max_norm=1.0)
    before, weight = copy_weights(strategy), strategy.trainable[0][1]
    for bad in (math.inf, math.nan):
        with strategy.accumulate():
            weight.grad = torch.full_like(weight, bad)
        assert not math.isfinite(strategy.step())
    after = copy_weights(strategy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(weight.grad is None for _, weight in strategy.trainable)
    assert strategy.optimizer_tensors() == {}  # not even the optimizer's moments


def test_step_returns_the_norm_before_clipping_and_drops_the_gradients(monkeypatch):
    strategy = make_strategy(max_norm=1.0)
    clipped: list[float] = []

    def record_norm() -> None:
        grads = [weight.grad for _, weight in strategy.trainable if weight.grad is not None]
        clipped.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))

    monkeypatch.setattr(strategy.optimizer, "step", record_norm)
    weight = strategy.trainable[0][1]
    with strategy.accumulate():
        (3 * weight).sum().backward()
    assert strategy.step() == pytest.approx(3 * math.sqrt(weight.numel()))
    assert clipped == [pytest.approx(1.0, rel=1e-4)]
    assert all(weight.grad is None for _, weight in strategy.trainable)


def test_gradients_are_summed_over_ranks_once_per_update(monkeypatch):
    strategy, calls = make_strategy(), []

    def add_equal_rank(accelerator: object, tensors: list[torch.Tensor]) -> None:
        calls.append(len(tensors))
        for tensor in tensors:
            tensor *= 2

    monkeypatch.setattr(strategies, "sum_over_ranks", add_equal_rank)
    (_, first), *_ = strategy.trainable
    with strategy.accumulate():
        first.sum().backward()
    assert calls == [len(strategy.trainable)]
    assert first.grad is not None
    assert bool((first.grad == 2).all())


class Link:
    """A link to a rank with equal gradients, which records what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_reduce(self, flat: Tensor, async_op: bool) -> Any:
        assert async_op
        self.sent.append(flat.clone())
        return SimpleNamespace(wait=lambda: flat.mul_(2))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    monkeypatch.setattr(torch.distributed, "all_reduce", link.all_reduce)
    monkeypatch.setattr(strategies, "OVERLAP_BYTES", 1 << 14)
    return link


def run_passes(strategy: Strategy, count: int = 2) -> None:
    batch = strategy.policy.dummy_batch()
    for _ in strategy.passes([batch] * count):
        strategy.policy.score(batch).logprobs.sum().backward()


@pytest.fixture(scope="module")
def sums() -> dict[str, Tensor]:
    """The sums over two ranks of the gradients of two passes."""
    alone = DataParallel(tiny_policy("qwen2_5_vl"), Accelerator(cpu=True))
    run_passes(alone)
    alone.reduce_gradients()
    return {name: 2 * w.grad for name, w in alone.trainable if w.grad is not None}


@pytest.fixture
def strategy(link: Link) -> DataParallel:
    """The strategy of one of two ranks."""
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    return DataParallel(tiny_policy("qwen2_5_vl"), ranks)


def check_sums(strategy: Strategy, sums: dict[str, Tensor]) -> None:
    assert all(torch.equal(w.grad, sums[n]) for n, w in strategy.trainable if w.grad is not None)
    assert {name for name, weight in strategy.trainable if weight.grad is not None} == set(sums)


def test_gradients_are_sent_while_the_last_pass_computes_others(link, strategy, sums):
    sent_at: list[int] = []
    strategy.trainable[-1][1].register_post_accumulate_grad_hook(
        lambda _: sent_at.append(len(link.sent))
    )
    run_passes(strategy)
    assert sent_at[0] == 0  # nothing in the first pass
    early = len(link.sent)
    assert early > 5
    strategy.reduce_gradients()
    assert len(link.sent) > early  # the vision tower's, at the end
    assert not torch.cat(link.sent[-3:]).any()  # without an image its gradient is 0
    check_sums(strategy, sums)
    # A rank without passes sends the same buckets.
    sizes = [len(flat) for flat in link.sent]
    strategy.drop_gradients()
    link.sent.clear()
    run_passes(strategy, count=0)
    strategy.reduce_gradients()
    assert [len(flat) for flat in link.sent] == sizes
    assert not torch.cat(link.sent).any()


def test_passes_that_run_out_of_memory_and_are_repeated_send_no_bucket_twice(link, strategy, sums):
    language = [w for n, w in strategy.trainable if "layers.0" in n and "visual" not in n]

    def fail(_: Tensor) -> None:
        if link.sent:  # late in the last pass
            handle.remove()
            raise torch.OutOfMemoryError

    handle = language[0].register_post_accumulate_grad_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        run_passes(strategy)
    assert len(link.sent) > 2
    strategy.drop_gradients()
    run_passes(strategy)
    strategy.reduce_gradients()
    assert sum(len(flat) for flat in link.sent) == sum(w.numel() for _, w in strategy.trainable)
    check_sums(strategy, sums)


def test_a_gradient_that_changes_after_it_is_finished_is_an_error(strategy):
    run_passes(strategy)
    with pytest.raises(KeyError):
        strategy.policy.score(strategy.policy.dummy_batch()).logprobs.sum().backward()
