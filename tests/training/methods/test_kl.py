"""The reference policy in real training steps: its weights, its refreshes and its cost."""

from types import SimpleNamespace

import pytest
import torch
from gpu_standins import record_copies
from small_runs import make_embedded_trainer

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.errors import UserError
from vlm_grpo.training.methods import Passes, Run
from vlm_grpo.training.methods.kl import ReferenceKL
from vlm_grpo.training.step_batch import Rollout


def make_reference(device: str, weight: torch.nn.Parameter) -> ReferenceKL:
    fields = {"beta": 0.1, "reference_refresh_every": 2, "reference_device": device}
    kl, strategy = ReferenceKL(ObjectiveSettings.model_validate(fields)), SimpleNamespace()
    strategy.trainable = [("w", weight)]
    kl.start(Run(None, strategy, None, None))  # type: ignore[arg-type]
    return kl


def test_a_host_snapshot_is_pinned_and_swapped_in_without_waiting(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(3))
    calls = record_copies(monkeypatch)
    reference = make_reference("cpu", weight)
    assert calls == ["pin", "copy_ without waiting", "wait"]
    calls.clear()
    with reference.snapshot.in_place():
        assert calls == ["to without waiting"]
    calls.clear()
    make_reference("model", weight)
    assert not calls


@pytest.mark.parametrize("saved", [{}, {"w": 3, "other": 3}, {"w": 1}])
def test_a_reference_of_other_weights_is_refused(saved):
    """A value of another shape would broadcast."""
    reference = make_reference("model", torch.nn.Parameter(torch.zeros(3)))
    tensors = {name: torch.zeros(size) for name, size in saved.items()}
    with pytest.raises(UserError, match="reference policy or teacher holds other weights"):
        reference.load_state_dict(None, tensors)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", ["model", "cpu"])
def test_the_reference_is_a_copy_that_is_swapped_in_by_reference(device, place):
    """A full weight is not copied; into a shard, the strategy's memory, ranks copy it."""
    weight = torch.nn.Parameter(torch.zeros(3, device=place))
    reference = make_reference(device, weight)
    with torch.no_grad():
        weight += 1
    pointer = weight.data_ptr()
    with reference.snapshot.in_place():
        assert weight.device.type == place
        assert not weight.any()
        assert weight.data_ptr() != pointer
    assert (weight == 1).all()
    assert weight.data_ptr() == pointer
    saved = {"w": torch.full((3,), 7.0)}
    reference.load_state_dict(None, saved)
    held = reference.state_dict()[1]["w"]
    assert held.tolist() == [7, 7, 7]
    reference.snapshot.move()
    assert (held.tolist(), saved["w"].tolist()) == ([1, 1, 1], [7, 7, 7])
    assert held.device.type == ("cpu" if device == "cpu" else place)
    assert not held.requires_grad


def test_a_reference_refreshed_in_every_step_costs_nothing_and_another_one_a_pass(tmp_path):
    works = []
    for beta, every in ((0, 1), (0.05, 1), (0.05, 5)):
        # The entropy has a weight so that no group is left out in any run.
        given = {"beta": beta, "reference_refresh_every": every, "entropy_coef": 1e-9}
        trainer = make_embedded_trainer(tmp_path, *(f"objective.{n}={v}" for n, v in given.items()))
        works.append((metrics := trainer.step())["work/update_tokens"])
        assert [*trainer.methods] == ["kl"] * (every == 5)
        assert ("time/reference" in metrics) == (every == 5)
    assert works[0] == works[1] == works[2] / 2


def test_gathered_weights_are_dropped_around_the_reference_pass(tmp_path, monkeypatch):
    """Copies of the policy's weights must not serve the reference, nor the other way round."""
    never = "objective.beta=0.05", "objective.reference_refresh_every=never"
    trainer = make_embedded_trainer(tmp_path, *never)
    _, weight = trainer.strategy.trainable[0]
    weight.data.zero_()  # the policy's; the reference's are not 0
    dropped: list[bool] = []
    monkeypatch.setattr(trainer.strategy, "release", lambda: dropped.append(bool(weight.any())))
    kl = trainer.methods["kl"]
    assert isinstance(kl, ReferenceKL)
    Passes(Rollout(()), (), trainer.strategy, 100).score(weights=kl.snapshot.in_place())
    assert dropped == [False, True]
    assert not weight.any()
