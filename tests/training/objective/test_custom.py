"""Losses and advantage estimators from a user's file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from groups import make_tokens

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.errors import UserError
from vlm_grpo.training.objective.advantages import STEP_ESTIMATORS, AdvantageInputs, step_advantages
from vlm_grpo.training.objective.custom import load_estimator, load_surrogate
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals

GUIDE = Path(__file__).parents[3] / "docs/objective.md"
LOGPROBS, OLD = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.8, -0.5])
BATCH = make_tokens(LOGPROBS, [2, 1], torch.tensor([1.0, -1.0]), old_logprobs=OLD)


def write(path: Path, names: str, body: str) -> str:
    path.write_text(f"import torch\n\n\ndef compute({names}):\n    {body}\n")
    return f"{path}:compute"


def write_loss(folder: Path, body: str, **fields: Any) -> ObjectiveSettings:
    loss = write(folder / "my_loss.py", "ratio, batch, settings", body)
    return ObjectiveSettings(loss=loss, **fields)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_loss_of_a_file_replaces_that_of_the_loss_type(tmp_path, loss_type):
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
def test_a_loss_that_cannot_be_used_is_refused(tmp_path, body, problem):
    with pytest.raises(UserError, match=f"objective.loss=.*my_loss.py:compute.*{problem}"):
        load_surrogate(write_loss(tmp_path, body))


def test_a_loss_may_use_sums_and_what_methods_scored_and_must_be_in_its_file(tmp_path):
    """Beside their terms, which are no part of the check."""
    body = "return (ratio * batch.completion_mean(ratio)[batch.completion]).log()"
    assert load_surrogate(write_loss(tmp_path, body)) is not None
    body = 'return ratio * (batch.logprobs.detach() - batch.scores["teacher_logprobs"])'
    for only in (False, True):
        settings = write_loss(tmp_path, body, distillation={"teacher": "any", "only": only})
        assert load_surrogate(settings) is not None
    # A file without the function is refused.
    with pytest.raises(UserError, match="the file has no function missing"):
        load_surrogate(ObjectiveSettings(loss=f"{tmp_path / 'my_loss.py'}:missing"))
    with pytest.raises(UserError, match="there is no loss file"):
        load_surrogate(ObjectiveSettings(loss="nowhere.py:compute"))


def write_estimator(folder: Path, body: str) -> str:
    return write(folder / "my_advantages.py", "inputs", body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return inputs.rewards[:1]", "one advantage per completion, or for each completion"),
        ("return [torch.ones(2) for _ in inputs.rewards]", "a tensor of one per token"),
        ("return inputs.rewards / 0", "is not finite"),
        ("return inputs.rewards.cumsum(0)", "depend on the order of the groups"),
        ("return inputs.rewards + inputs.groups", "depend on the order of the groups"),
        ("return unknown", r"my_advantages.py, line 5: NameError"),
        ("return None", "one advantage per completion"),
    ],
)
def test_an_estimator_that_cannot_be_used_is_refused(tmp_path, body, problem):
    message = f"advantage_estimator=.*my_advantages.py:compute.*{problem}"
    with pytest.raises(UserError, match=message):
        load_estimator(write_estimator(tmp_path, body))


def test_an_estimator_of_a_file_gets_what_own_ones_get_and_is_read_again_if_changed(tmp_path):
    body = """values = inputs.rewards - inputs.group_means
    if inputs.penalties is None:
        return values / (values.std() + 1e-4)
    return [v - p.flip(0).cumsum(0).flip(0) for v, p in zip(values, inputs.penalties)]"""
    estimator: Any = load_estimator(write_estimator(tmp_path, body))
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0])
    found = step_advantages(rewards, "aabb", torch.tensor([1, 2, 1, 1]), estimator)
    assert found.values.tolist() == pytest.approx([1.2245, -1.2245, 0, 0], abs=1e-3)
    assert found.zero_spread.tolist() == [False, True]
    with pytest.raises(UserError, match="there is no advantage estimator file x"):
        load_estimator("x.py:f")
    assert load_estimator("reinforce_plus_plus") is STEP_ESTIMATORS["reinforce_plus_plus"]
    # One that has changed is read again, as in a notebook, where one process starts several runs.
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 1]))
    for factor in (1.0, 20.0):  # a file of another size is new even within the same second
        body = f"return {factor} * inputs.rewards"
        estimator = load_estimator(write_estimator(tmp_path, body))
        assert list(estimator(inputs)) == [factor, 0.0]


def test_the_examples_of_the_guide_can_be_used(tmp_path):
    code = GUIDE.read_text("utf-8").split("```python\n")[1:]
    path = tmp_path / "mine.py"
    path.write_text("\n\n".join(part.partition("```")[0] for part in code))
    assert load_surrogate(ObjectiveSettings(loss=f"{path}:soft_loss")) is not None
    estimator: Any = load_estimator(f"{path}:decayed_advantages")
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 1]))
    first, second = estimator(inputs)
    # GAE with the group's mean as the value of every token, by its recursion from the end.
    expected = [0.5]
    for _ in range(2):
        expected.insert(0, 0.0 + 0.95 * expected[0])
    assert first.tolist() == pytest.approx(expected)
    assert second.tolist() == [-0.5]
