"""An update waits for the device only once, after its last backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meta_device import build_policy, no_host_tensors, use_gpu_kernels
from small_runs import make_trainer
from tiny_models import add_lora, make_prompt, noise_example, tiny_policy
from work_counts import count_work

from vlm_grpo.config.methods import WarmStartSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.model.engine.batch import GroupSlice
from vlm_grpo.training import update
from vlm_grpo.training.batch import StepBatch, TokenBudget, TokenLayout
from vlm_grpo.training.methods import build_methods
from vlm_grpo.training.objective import StepTotals, completion_weights
from vlm_grpo.training.update import Updater

LENGTHS = (3, 2, 1)
KL: dict[str, Any] = {"beta": 0.1, "reference_refresh_every": 5}
CORRECTED: dict[str, Any] = {"loss_type": "dapo", "sampler_correction": "token"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"importance_sampling_level": "sequence", "delta": 2.0, **KL},
    **{name: {**KL, "kl_estimator": name} for name in ("k1", "k2", "k3")},
    "fresh reference": {"beta": 0.1, "entropy_coef": 0.1, "mask_truncated_completions": True},
    **{
        f"{kind} {form}": {**CORRECTED, "loss_type": kind, "sampler_correction": form}
        for kind in ("dapo", "vespo")
        for form in ("token", "sequence", "token_mask", "sequence_mask")
    },
    "distillation": {"distillation": {"teacher": "model", "only": True}, **CORRECTED},
    "perception": {"perception": {"kl_coef": 0.1, "top_share": 0.4}},
}


@functools.cache
def get_policy(lora: bool) -> Any:
    return build_policy("qwen2_5_vl", lora)


def make_step(policy: Any, objective: ObjectiveSettings, num_iterations: int) -> StepBatch:
    """Build three groups with every optional input. The third comes from the replay buffer."""
    sizes = [[(56, 56), (84, 28)], [(28, 56)], []]
    prompts = [make_prompt(policy, noise_example(str(len(s)), s)) for s in sizes]
    tokens = tuple((1,) * length for length in LENGTHS)
    slices = [GroupSlice(p, tokens, tuple(range(3 * i, 3 * i + 3))) for i, p in enumerate(prompts)]
    lengths = torch.tensor(LENGTHS * 3)
    active = torch.ones(9, dtype=torch.bool)
    totals = StepTotals(9, 18, 3)
    methods = build_methods({"objective": objective})
    weights = completion_weights(lengths, active, totals, objective, methods)
    on_device, on_host = torch.zeros(18, device=policy.device), torch.zeros(18)
    values = {"sampler_logprobs": on_host}
    if objective.needs_reference:
        values["reference_logprobs"] = on_device
    if objective.distillation is not None:
        values["teacher_logprobs"] = on_device
    if objective.perception is not None:
        values |= {"masked_logprobs": on_device, "token_factors": on_host}
    if objective.loss_type == "dapo":
        values["token_advantages"] = on_host
    layout, recalled = TokenLayout.of(LENGTHS * 3), 12
    behind = torch.arange(9) == 0
    rest = num_iterations, recalled, behind
    return StepBatch((tuple(slices),), layout, torch.ones(9), active, weights, values, *rest)


def make_updater(policy: Any, objective: ObjectiveSettings) -> Updater:
    strategy: Any = SimpleNamespace(policy=policy, passes=iter, gathered=contextlib.nullcontext)
    settings: Any = SimpleNamespace(objective=objective)
    methods = build_methods({"objective": objective, "warm_start": WarmStartSettings(steps=1)})
    return Updater(strategy, None, settings, TokenBudget(100, ""), methods=methods)


def accumulate(updater: Updater, batch: StepBatch, guard: Any = no_host_tensors) -> None:
    """Do what ``Updater.update`` does in a step, up to the gradients."""
    with guard():
        old = updater._start_old(batch)  # noqa: SLF001
        for number in range(batch.num_updates):
            losses, metrics = updater._accumulate(batch, number, old)  # noqa: SLF001
            assert len(losses) > 1
            assert losses[0].device == updater.policy.device
            assert metrics.means


@pytest.mark.parametrize(
    ("name", "lora"), [("gspo", False), *((name, True) for name in OBJECTIVES)]
)
def test_gradients_are_accumulated_without_waiting_for_the_device(name, lora, monkeypatch):
    use_gpu_kernels(monkeypatch)
    objective = ObjectiveSettings.model_validate(OBJECTIVES[name])
    policy = get_policy(lora)
    accumulate(make_updater(policy, objective), make_step(policy, objective, 2))


@contextlib.contextmanager
def refuse_waiting() -> Iterator[None]:
    """Raise an error inside wherever the host waits for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["grpo", "gspo", "vespo token", "perception"])
def test_gradients_are_accumulated_on_a_gpu_without_waiting(name, device):
    objective = ObjectiveSettings.model_validate(OBJECTIVES[name])
    policy = tiny_policy("qwen2_5_vl", dtype=torch.bfloat16)
    add_lora(policy, ["q_proj", "down_proj"])
    policy.model.to(device)
    updater, batch = make_updater(policy, objective), make_step(policy, objective, 2)
    accumulate(updater, batch, contextlib.nullcontext)  # libraries prepare themselves
    accumulate(updater, batch, refuse_waiting if device == "cuda" else contextlib.nullcontext)
    grads = [w.grad for _, w in policy.trainable_parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def test_supervised_gradients_are_accumulated_without_waiting(monkeypatch):
    use_gpu_kernels(monkeypatch)
    objective, policy = ObjectiveSettings(), get_policy(True)
    batch = make_step(policy, objective, 1)
    weights = {"warm_start": torch.ones(9)}
    batch = replace(batch, weights=weights, recalled=None, is_written=True)
    accumulate(make_updater(policy, objective), batch)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tokens: tokens.logprobs.sum().item(),
        lambda tokens: tokens.logprobs[tokens.logprobs > 0],
        lambda tokens: tokens.completion.repeat_interleave(tokens.completion),
        lambda tokens: torch.tensor([1.0], device=tokens.logprobs.device),
        lambda tokens: torch.ones(2).to(tokens.logprobs.device),
        lambda tokens: tokens.logprobs[torch.tensor([0])],
    ],
)
def test_what_waits_for_the_device_is_found(wrong, monkeypatch):
    use_gpu_kernels(monkeypatch)
    objective, policy, compute_loss = ObjectiveSettings(), get_policy(True), update.compute_loss
    monkeypatch.setattr(
        update,
        "compute_loss",
        lambda tokens, *rest: [compute_loss(tokens, *rest), wrong(tokens)][0],
    )
    with pytest.raises(RuntimeError):
        accumulate(make_updater(policy, objective), make_step(policy, objective, 1))


def test_an_update_reads_its_loss_and_its_norm_once(settings):
    """On one prompt without images, whose sizes would be read on the host."""
    reads = []
    for limit in (10**6, 1):
        trainer = make_trainer(settings())
        objective = trainer.settings.objective
        batch = make_step(trainer.policy, objective, 1)
        batch = replace(batch, mini_batches=((batch.mini_batches[0][-1],),), recalled=None)
        trainer.updater.budget.tokens = limit
        with count_work() as counts:
            trainer.updater.update(batch)
        reads.append(counts["host_reads"])
    assert reads[0] == reads[1]
