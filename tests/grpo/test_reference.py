"""The reference policy in real training steps: what it is, when it changes, what it costs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, make_embedded_trainer

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.batch import build_slices
from vlm_grpo.grpo.reference import Reference
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.trainer import Trainer, train
from vlm_grpo.types import Group

FULL: tuple[str, ...] = ()
LORA = ("policy.lora.r=4", "policy.lora.alpha=8")
KL = "objective.beta=0.05"

both_kinds = pytest.mark.parametrize("weights", [FULL, LORA], ids=["full", "lora"])


def steps(trainer: Trainer, count: int) -> list[dict[str, float]]:
    found = []
    for _ in range(count):
        found.append(trainer.step())
    return found


class Peer:
    """A policy of its own over a deep copy of the trainer's model, and what it scores."""

    def __init__(self, trainer: Trainer) -> None:
        own = trainer.policy
        loaded = LoadedModel(
            copy.deepcopy(own.model), own.processor, own.family, own.budget, own.shared, None
        )
        self.updater = replace(trainer.updater, policy=Policy(loaded, own.distribution))

    def logprobs(self, groups: Sequence[Group]) -> dict[int, torch.Tensor]:
        everything = [True] * sum(len(group.completions) for group in groups)
        return self.updater.logprobs(build_slices(groups, everything))


@both_kinds
@pytest.mark.parametrize("every", [5, "never"])
def test_the_reference_is_the_policy_of_the_last_kth_step(
    tmp_path: Path, weights: tuple[str, ...], every: int | str
) -> None:
    """Over 12 steps: the log-probs of a deep copy made before steps 0, 5, 10, or 0 alone."""
    trainer = make_embedded_trainer(
        tmp_path, KL, f"objective.reference_refresh_every={every}", *weights
    )
    kept = Peer(trainer)
    passes: list[tuple[Sequence[Group], Mapping[int, torch.Tensor]]] = []
    score_reference = trainer.updater.score_reference

    def recorded(groups: Sequence[Group], step: int) -> Any:
        scores = score_reference(groups, step)
        passes.append((groups, scores.logprobs))
        return scores

    trainer.updater.score_reference = recorded
    apart = []
    for step in range(12):
        if every != "never" and step % int(every) == 0:
            kept = Peer(trainer)
        now = Peer(trainer)
        steps(trainer, 1)
        groups, found = passes[-1]
        expected, policy = kept.logprobs(groups), now.logprobs(groups)
        assert set(found) == set(expected) == set(range(12))
        # The same numbers went through the same operations: equal to the last bit.
        assert all(torch.equal(found[row], expected[row]) for row in found)
        apart.append(max((found[row] - policy[row]).abs().max().item() for row in found))
    fresh = [step for step in range(12) if apart[step] == 0]
    assert fresh == ([0] if every == "never" else [0, 5, 10])
    assert max(apart) > 0.01  # nats: the policy has moved, so equality above says something


@both_kinds
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_reference_of_this_very_step_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[str, ...], iterations: int
) -> None:
    """k = 1: no snapshot, no pass, and the work of a run without any reference."""
    works = {}
    for beta in (0, 0.05):
        trainer = make_embedded_trainer(
            tmp_path,
            f"objective.beta={beta}",
            "objective.entropy_coef=1e-9",  # so that no group is left out on either side
            f"objective.num_iterations={iterations}",
            *weights,
        )
        calls: list[int] = []
        score = trainer.policy.score

        def counted(*arguments: Any, score: Any = score, calls: list[int] = calls) -> Any:
            calls.append(arguments[0].num_tokens)
            return score(*arguments)

        monkeypatch.setattr(trainer.policy, "score", counted)
        rows = steps(trainer, 2)
        assert trainer.updater.reference.snapshot is None
        assert trainer.updater.reference.state_dict() == {}
        names = [name for name in rows[0] if name.startswith("work/")]
        assert "work/update_tokens" in names
        assert len(calls) == 2 * iterations  # one forward pass for each update, none besides
        # Twelve completions of two tokens, and three prompts: the second step's depend on β.
        works[beta] = ({name: rows[0][name] for name in names}, calls[:iterations])
    assert works[0] == works[0.05]


def test_a_snapshot_costs_one_pass_a_step(tmp_path: Path) -> None:
    """What the test above would see if k = 1 kept a reference."""
    works = []
    for every in (1, 5):
        trainer = make_embedded_trainer(tmp_path, KL, f"objective.reference_refresh_every={every}")
        works.append(steps(trainer, 1)[0]["work/update_tokens"])
    assert works[1] == 2 * works[0]


@both_kinds
def test_a_snapshot_on_the_host_gives_the_same_run(
    tmp_path: Path, weights: tuple[str, ...]
) -> None:
    runs = []
    for device in ("model", "cpu"):
        trainer = make_embedded_trainer(
            tmp_path,
            KL,
            "objective.reference_refresh_every=2",
            f"objective.reference_device={device}",
            *weights,
        )
        rows = steps(trainer, 4)
        kept = [(n, w.detach().clone()) for n, w in trainer.policy.trainable_parameters()]
        runs.append(([(row["loss"], row["kl"]) for row in rows], kept))
    assert runs[0][0] == runs[1][0]
    pairs = zip(runs[0][1], runs[1][1], strict=True)
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


def reference_of(device: str, weight: torch.nn.Parameter) -> Reference:
    fields = {"beta": 0.1, "reference_refresh_every": 2, "reference_device": device}
    return Reference([("w", weight)], ObjectiveSettings.model_validate(fields))


def test_a_host_snapshot_leaves_the_weights_device() -> None:
    """Without an accelerator, torch's device without memory stands in: nothing can leave it."""
    weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
    assert reference_of("model", weight).state_dict()["w"].device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        reference_of("cpu", weight)


@pytest.mark.gpu
def test_a_host_snapshot_on_an_accelerator() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    host = reference_of("cpu", weight)
    assert host.state_dict()["w"].device.type == "cpu"
    weight.data.add_(1)
    with host.in_place():
        assert weight.device.type == "cuda"
        assert weight.tolist() == [0, 0, 0]
    assert weight.tolist() == [1, 1, 1]
    host.refresh(2)
    assert host.state_dict()["w"].tolist() == [1, 1, 1]


def test_a_snapshot_is_apart_from_the_weights_and_from_what_it_was_loaded_from() -> None:
    for device in ("model", "cpu"):
        weight = torch.nn.Parameter(torch.zeros(3))
        reference = reference_of(device, weight)
        weight.data.add_(1)
        assert reference.state_dict()["w"].tolist() == [0, 0, 0]
        saved = {"w": torch.full((3,), 7.0)}
        reference.load_state_dict(saved)
        assert not reference.refresh(1)  # not due: 1 is no multiple of 2
        assert reference.state_dict()["w"].tolist() == [7, 7, 7]
        assert reference.refresh(2)
        assert reference.state_dict()["w"].tolist() == [1, 1, 1]
        assert saved["w"].tolist() == [7, 7, 7]


def test_a_snapshot_of_another_model_is_refused() -> None:
    reference = reference_of("model", torch.nn.Parameter(torch.zeros(3)))
    for wrong in ({}, {"v": torch.zeros(3)}, {"w": torch.zeros(1)}):  # the last would broadcast
        with pytest.raises(UserError, match="other weights"):
            reference.load_state_dict(wrong)


def test_a_host_snapshot_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    """Broken off between two refreshes, a run goes on with the reference that it had."""
    changes = [
        f"output_dir={tmp_path}",
        *SMALL,
        KL,
        "objective.reference_refresh_every=3",
        "objective.reference_device=cpu",
        "optim.max_steps=4",
        "checkpoint.every=2",
    ]
    kls = []
    for name in ("unbroken", "broken"):
        settings = load_settings("quickstart", [*changes, f"name={name}"])
        train(settings)
        if name == "broken":
            last = settings.run_dir / "checkpoints" / "step-4"
            last.rename(tmp_path / "aside")
            train(settings.model_copy(update={"resume": True}))
        lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
        kls.append([json.loads(line)["kl"] for line in lines])
    assert kls[0] == kls[1]
    assert kls[0][2] > 0  # step 2 was held to the snapshot of step 0, which the checkpoint has
