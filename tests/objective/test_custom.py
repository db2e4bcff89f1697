"""Losses from a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.errors import UserError
from vlm_grpo.objective import StepTotals, TokenBatch, load_surrogate, policy_loss

GUIDE = Path(__file__).parents[2] / "docs/objective.md"
BATCH = TokenBatch(
    logprobs=torch.tensor([-1.0, -2.0, -0.5]),
    completion=torch.tensor([0, 0, 1]),
    advantages=torch.tensor([1.0, -1.0]),
    lengths=torch.tensor([2, 1]),
    old_logprobs=torch.tensor([-1.1, -1.8, -0.5]),
)


def write_loss(folder: Path, body: str, **fields: str) -> ObjectiveSettings:
    path = folder / "my_loss.py"
    path.write_text(f"import torch\n\n\ndef compute(ratio, batch, settings):\n    {body}\n")
    return ObjectiveSettings(loss=f"{path}:compute", **fields)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_loss_of_a_file_replaces_that_of_the_loss_type(tmp_path: Path, loss_type: str) -> None:
    """The same formula gives the same loss, with the weights of the loss type."""
    body = "return -ratio.clamp(max=1.05) * batch.per_token_advantages"
    settings = write_loss(tmp_path, body, loss_type=loss_type)
    own = policy_loss(BATCH, StepTotals(2, 3, 4), settings, load_surrogate(settings))
    bounds = {"epsilon": 0.999, "epsilon_high": 1e9, "delta": 1.05}
    equal = ObjectiveSettings(loss_type=loss_type, num_iterations=2).model_copy(update=bounds)
    theirs = policy_loss(BATCH, StepTotals(2, 3, 4), equal)
    assert own.loss.item() == pytest.approx(theirs.loss.item(), abs=1e-7)
    assert not any("clip" in name for name in own.metrics.means)  # its bounds are not known
    assert not settings.can_skip_zero_advantages
    assert load_surrogate(ObjectiveSettings()) is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return ratio * batch.advantages.mean()", "depends on how a step is cut"),
        ("return ratio * batch.per_token_advantages / len(ratio)", "depends on how a step is cut"),
        ("return (ratio * batch.per_token_advantages).sum()", r"not one of shape \[\]"),
        ("return None", "not NoneType"),
        ("return ratio.detach()", "have no gradient"),
        ("return ratio * batch.logprobs / 0", "is not finite"),
        ("return ratio * unknown", r"my_loss.py, line 5: NameError"),
        ("raise SystemExit(3)", r"my_loss.py, line 5: SystemExit: 3"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"objective.loss=.*my_loss.py:compute.*{problem}"):
        load_surrogate(write_loss(tmp_path, body))


def test_sums_over_a_completion_are_allowed(tmp_path: Path) -> None:
    body = "return (ratio * batch.completion_mean(ratio)[batch.completion]).log()"
    assert load_surrogate(write_loss(tmp_path, body)) is not None


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    write_loss(tmp_path, "return ratio")
    with pytest.raises(UserError, match="the file has no function missing"):
        load_surrogate(ObjectiveSettings(loss=f"{tmp_path / 'my_loss.py'}:missing"))
    with pytest.raises(UserError, match="there is no loss file"):
        load_surrogate(ObjectiveSettings(loss="nowhere.py:compute"))


def test_the_loss_of_the_guide_can_be_used(tmp_path: Path) -> None:
    code = GUIDE.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    path = tmp_path / "my_loss.py"
    path.write_text(code)
    assert load_surrogate(ObjectiveSettings(loss=f"{path}:soft_loss")) is not None
