"""The reference policy in real training steps: its weights, its refreshes and its cost."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_standins import record_copies
from small_runs import make_embedded_trainer

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.training.batch import Rollout, build_slices, score_slices
from vlm_grpo.training.methods import Passes, Run
from vlm_grpo.training.methods.kl import ReferenceKL
from vlm_grpo.training.trainer import Trainer

FULL: tuple[str, ...] = ()
LORA = ("policy.lora.r=4", "policy.lora.alpha=8")
KL = "objective.beta=0.05"


def make_reference(device: str, weight: torch.nn.Parameter) -> ReferenceKL:
    fields = {"beta": 0.1, "reference_refresh_every": 2, "reference_device": device}
    kl, strategy = ReferenceKL(ObjectiveSettings.model_validate(fields)), SimpleNamespace()
    strategy.trainable = [("w", weight)]
    kl.start(Run(None, strategy, None, None))  # type: ignore[arg-type]
    return kl


def get_held(kl: ReferenceKL) -> torch.Tensor:
    """Return the reference's weight."""
    return kl.state_dict()[1]["w"]


def test_a_host_snapshot_leaves_the_weights_device():
    """Torch's device without memory replaces an accelerator: nothing can be copied from it."""
    weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
    assert get_held(make_reference("model", weight)).device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        make_reference("cpu", weight)


@pytest.mark.gpu
def test_a_host_snapshot_on_an_accelerator():
    weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    host = make_reference("cpu", weight)
    assert get_held(host).device.type == "cpu"
    weight.data.add_(1)
    with host.snapshot.in_place():
        assert weight.device.type == "cuda"
        assert weight.tolist() == [0, 0, 0]
    assert weight.tolist() == [1, 1, 1]
    host.snapshot.move()
    assert get_held(host).tolist() == [1, 1, 1]


def test_a_host_snapshot_is_pinned_and_swapped_in_without_waiting(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(3))
    calls = record_copies(monkeypatch)
    reference = make_reference("cpu", weight)
    assert calls == ["pin", "copy_ without waiting", "wait"]
    calls.clear()
    with reference.snapshot.in_place():
        assert calls == ["to without waiting"]


def test_a_snapshot_shares_no_memory_with_weights_or_loaded_state():
    for device in ("model", "cpu"):
        weight = torch.nn.Parameter(torch.zeros(3))
        reference = make_reference(device, weight)
        weight.data.add_(1)
        assert get_held(reference).tolist() == [0, 0, 0]
        saved = {"w": torch.full((3,), 7.0)}
        reference.load_state_dict(None, saved)
        assert get_held(reference).tolist() == [7, 7, 7]
        reference.snapshot.move()
        assert get_held(reference).tolist() == [1, 1, 1]
        assert not get_held(reference).requires_grad
        assert saved["w"].tolist() == [7, 7, 7]


def test_the_reference_is_swapped_in_by_reference():
    """A full weight is not copied; into a shard, the strategy's memory, ranks copy it."""
    weight = torch.nn.Parameter(torch.zeros(3))
    reference = make_reference("model", weight)
    with torch.no_grad():
        weight += 1
    pointer = weight.data_ptr()
    with reference.snapshot.in_place():
        assert not weight.any()
        assert weight.data_ptr() != pointer
    assert (weight == 1).all()
    assert weight.data_ptr() == pointer


def test_a_snapshot_of_another_model_is_refused():
    reference = make_reference("model", torch.nn.Parameter(torch.zeros(3)))
    for wrong in ({}, {"v": torch.zeros(3)}, {"w": torch.zeros(1)}):  # the last would broadcast
        with pytest.raises(UserError, match="other weights"):
            reference.load_state_dict(None, wrong)


def run_steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
    return [trainer.step() for _ in range(count)]


class FrozenPolicy:
    """A deep copy of the trainer's policy, which scores completions."""

    def __init__(self, trainer: Trainer) -> None:
        own = trainer.policy
        loaded = LoadedModel(copy.deepcopy(own.model), own.prompts, own.shared, None)
        self.policy, self.budget = Policy(loaded, own.distribution), trainer.updater.budget

    def logprobs(self, rollout: Rollout) -> torch.Tensor:
        slices = build_slices(rollout.groups, [True] * len(rollout.completions))
        return score_slices(self.policy, slices, rollout.layout, self.budget.limit).logprobs


@pytest.mark.parametrize(("weights", "every"), [(FULL, 2), (LORA, "never")], ids=["full", "lora"])
def test_the_reference_is_the_policy_at_its_last_refresh(tmp_path, weights, every):
    """Over 5 steps: the log-probs of a deep copy made before steps 0, 2, 4, or 0 alone."""
    trainer = make_embedded_trainer(
        tmp_path, KL, f"objective.reference_refresh_every={every}", *weights
    )
    reference = FrozenPolicy(trainer)
    passes: list[tuple[Rollout, torch.Tensor]] = []
    score = trainer.updater.score

    def record_pass(rollout: Rollout) -> Any:
        scores = score(rollout)
        passes.append((rollout, scores["reference_logprobs"]))
        return scores

    trainer.updater.score = record_pass
    differences = []
    for step in range(5):
        if every != "never" and step % int(every) == 0:
            reference = FrozenPolicy(trainer)
        current = FrozenPolicy(trainer)
        run_steps(trainer, 1)
        rollout, found = passes[-1]
        # Equal numbers went through equal operations: bit-identical.
        assert torch.equal(found, reference.logprobs(rollout))
        differences.append((found - current.logprobs(rollout)).abs().max().item())
    fresh = [step for step in range(5) if differences[step] == 0]
    assert fresh == ([0] if every == "never" else [0, 2, 4])
    assert max(differences) > 0.01  # nats: the policy has changed, or the test would be empty


def test_a_reference_refreshed_in_every_step_costs_nothing_and_another_one_a_pass(tmp_path):
    works = []
    for beta, every in ((0, 1), (0.05, 1), (0.05, 5)):
        trainer = make_embedded_trainer(
            tmp_path,
            f"objective.beta={beta}",
            f"objective.reference_refresh_every={every}",
            "objective.entropy_coef=1e-9",  # so that no group is left out in any run
        )
        works.append(trainer.step()["work/update_tokens"])
        assert [*trainer.methods] == ["kl"] * (every == 5)
    assert works[0] == works[1] == works[2] / 2


def test_a_snapshot_on_the_host_gives_the_same_run(tmp_path):
    runs = []
    for device in ("model", "cpu"):
        trainer = make_embedded_trainer(
            tmp_path,
            KL,
            "objective.reference_refresh_every=2",
            f"objective.reference_device={device}",
        )
        rows = run_steps(trainer, 4)
        weights_after = [(n, w.detach()) for n, w in trainer.policy.trainable_parameters()]
        runs.append(([(row["loss"], row["kl"]) for row in rows], weights_after))
    assert runs[0][0] == runs[1][0]
    pairs = zip(runs[0][1], runs[1][1], strict=True)
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


def test_gathered_weights_are_dropped_around_the_reference_pass(tmp_path, monkeypatch):
    """Copies of the policy's weights must not serve the reference, nor the other way round."""
    trainer = make_embedded_trainer(tmp_path, KL, "objective.reference_refresh_every=never")
    _, weight = trainer.strategy.trainable[0]
    weight.data.zero_()  # the policy's; the reference's are not 0
    dropped: list[bool] = []
    monkeypatch.setattr(trainer.strategy, "release", lambda: dropped.append(bool(weight.any())))
    kl = trainer.methods["kl"]
    assert isinstance(kl, ReferenceKL)
    Passes(Rollout(()), (), trainer.strategy, 100).logprobs(weights=kl.snapshot.in_place())
    assert dropped == [False, True]
    assert not weight.any()
