"""The updates of a step: their metrics, their schedule, and lack of memory."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from groups import make_advantages
from small_runs import make_trainer

from vlm_grpo.errors import UserError
from vlm_grpo.training import update as update_module
from vlm_grpo.training.batch import StepBatch
from vlm_grpo.training.objective import MetricAccumulator
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.training.update import Updater, build_updater, pack_step, sum_metrics


def make_batch(trainer: Trainer) -> StepBatch:
    """Sample a step, and give its completions alternating advantages."""
    rollout = trainer.sampler.sample(0)
    count = sum(len(group.completions) for group in rollout.groups)
    advantages = torch.tensor([1.0, -1.0]).repeat(count // 2)
    settings, ranks = trainer.settings, trainer.accelerator
    return pack_step(rollout, {}, make_advantages(advantages), {}, settings, ranks)


def test_the_schedule_advances_once_per_step(settings, monkeypatch):
    run = settings(objective={"num_iterations": 3}, optim={"schedule": "linear", "lr": 4e-3})
    trainer = make_trainer(run)
    losses, accumulate, step = [], trainer.updater._accumulate, trainer.strategy.step  # noqa: SLF001
    norms = iter([3.0, math.nan, 2.0])
    monkeypatch.setattr(trainer.strategy, "step", lambda: [step(), next(norms)][1])

    def record(*arguments: Any) -> Any:
        found = accumulate(*arguments)
        losses.append(sum(loss.item() for loss in found[0]))
        return found

    monkeypatch.setattr(trainer.updater, "_accumulate", record)
    metrics = trainer.updater.update(make_batch(trainer))
    assert len(losses) == 3
    assert metrics["loss"] == pytest.approx(sum(losses) / 3)
    assert (metrics["grad_norm"], metrics["skipped_updates"]) == (2.0, 1)
    assert trainer.updater.scheduler.get_last_lr()[0] == pytest.approx(3e-3)  # 3/4 of lr


def test_a_step_whose_updates_were_all_skipped_does_not_advance_the_schedule(settings):
    trainer = make_trainer(settings(optim={"schedule": "linear", "lr": 4e-3}))
    batch = make_batch(trainer)
    spoiled = replace(batch, advantages=batch.advantages * math.nan)
    assert trainer.updater.update(spoiled)["skipped_updates"] == 1
    assert trainer.updater.scheduler.get_last_lr()[0] == 4e-3


def test_running_out_of_memory_changes_only_the_micro_batches(settings, monkeypatch, caplog):
    def compute_norm(is_limited: bool) -> float:
        torch.manual_seed(0)
        trainer = make_trainer(settings())
        trainer.policy.form_check = None  # also calls ``score``
        score, calls = trainer.policy.score, []

        def score_within_limit(batch: Any, *rest: Any) -> Any:
            calls.append(batch.num_tokens)
            if is_limited and batch.num_tokens > 130:
                raise torch.OutOfMemoryError("out of memory")
            return score(batch, *rest)

        monkeypatch.setattr(trainer.policy, "score", score_within_limit)
        freed: list[int] = []
        monkeypatch.setattr(trainer.policy.engine, "release", lambda: freed.append(1))
        norm = trainer.step()["grad_norm"]
        assert (len(calls) > 1) == is_limited
        assert (len(freed) > 1) == is_limited  # once by the rollout itself, on a CPU
        return norm

    expected = compute_norm(is_limited=False)
    assert compute_norm(is_limited=True) == pytest.approx(expected, rel=1e-5)
    assert (
        "processing 100 tokens at a time from now on; set optim.max_tokens_per_batch=100"
        in caplog.text
    )


def test_updates_run_in_training_mode(settings, monkeypatch):
    """Gradient checkpointing needs it."""
    trainer = make_trainer(settings())
    trainer.policy.form_check = None  # also calls ``score``
    score, modes = trainer.policy.score, []

    def record_mode(*arguments: Any) -> Any:
        modes.append(trainer.policy.model.training)
        return score(*arguments)

    monkeypatch.setattr(trainer.policy, "score", record_mode)
    trainer.policy.model.eval()
    trainer.step()
    assert modes == [True]


def test_micro_batches_share_the_passes_of_their_images(settings):
    """Three images: one pass each in the rollout, and one in the update of the vision tower."""
    trainer = make_trainer(settings(optim={"max_tokens_per_batch": 60}))
    assert trainer.step()["work/encoder_passes"] == 3 + 3


@pytest.mark.parametrize(("kl_in", "counts"), [("reward", [12, 12]), ("loss", [12, 8])])
def test_later_mini_batches_are_scored_once(settings, kl_in, counts, monkeypatch):
    """The reference scores all, and so does the policy for a KL in the reward."""
    kl = {"beta": 0.1, "kl_in": kl_in, "kl_estimator": "k1", "reference_refresh_every": "never"}
    trainer, scored = make_trainer(settings(objective=kl, optim={"mini_batches": 3})), []
    logprobs = trainer.updater.logprobs

    def count(layout: Any, slices: Any, *rest: Any) -> Any:
        scored.append(sum(len(piece.rows) for piece in slices))
        return logprobs(layout, slices, *rest)

    monkeypatch.setattr(trainer.updater, "logprobs", count)
    trainer.step()
    assert scored == counts


def test_out_of_memory_on_one_completion_is_an_error(settings, monkeypatch):
    trainer = make_trainer(settings())
    batch = make_batch(trainer)

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trainer.policy, "score", fail)
    with pytest.raises(UserError, match=r"single completion of \d+ tokens.*policy\.max_pixels"):
        trainer.updater.update(batch)


def test_other_errors_of_the_backward_pass_are_raised(settings, monkeypatch):
    trainer = make_trainer(settings())
    batch = make_batch(trainer)

    def fail(*args: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Updater, "_backward", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        trainer.updater.update(batch)


@pytest.mark.parametrize(
    ("device", "may_retry", "message"),
    [
        ("cpu", True, "this run computes on cpu: remove it"),
        ("cuda", False, "not possible with sharded weights"),
        ("cuda", True, None),
    ],
)
def test_activations_can_be_offloaded_from_a_gpu_that_has_all_weights(
    settings, monkeypatch, device, may_retry, message
):
    """A strategy that only names its device stands for a GPU."""
    weights = [("weight", torch.nn.Parameter(torch.zeros(1)))]
    strategy = SimpleNamespace(
        trainable=weights,
        attach_optimizer=lambda *_: None,
        may_retry=may_retry,
        accelerator=SimpleNamespace(device=torch.device(device)),
    )
    monkeypatch.setattr(update_module, "build_strategy", lambda *_: strategy)
    run = settings(policy={"activation_offloading": True})
    policy: Any = SimpleNamespace(model=None, device=None)
    ranks: Any = strategy.accelerator
    if message is None:
        offload: Any = build_updater(policy, run, ranks).offload
        assert offload.func is update_module.offload_activations
    else:
        with pytest.raises(UserError, match=message):
            build_updater(policy, run, ranks)


def test_the_effective_sample_size_is_the_share_of_equal_weights():
    """Weights of 3 and 1: (3 + 1)² / (2 · (9 + 1)), from the sums of two micro-batches."""
    name = "sampling/importance_sampling_ratio"
    parts = [
        MetricAccumulator({f"{name}/mean": (w, 1), f"{name}/mean_square": (w * w, 1)})
        for w in (3.0, 1.0)
    ]
    _, metrics = sum_metrics(0.0, parts[0] + parts[1])
    assert metrics["sampling/effective_sample_size"] == pytest.approx(0.8)
    assert metrics[f"{name}/mean"] == 2.0
    assert f"{name}/mean_square" not in metrics
