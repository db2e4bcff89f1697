"""The interface of methods: who knows their names, and methods of the user's own files."""

import re
from pathlib import Path

import pytest
import torch
from small_runs import TASK, make_trainer
from steps import capture_step

import vlm_grpo.training
from vlm_grpo.errors import UserError
from vlm_grpo.training.methods import build_methods

ROOT = Path(vlm_grpo.training.__file__).parent
EXAMPLE = Path(__file__).parents[3] / "docs/examples/first_tokens.py"
NAMES = re.compile(
    "noise|noisy|replay|curriculum|distill|teacher|perception|masked_logprobs|warm_start|supervised"
    "|cross_entropy|top_entropy|tool_gain|visual_credit|revision"
)
EMPTY = """
from vlm_grpo.training.methods import Method

class Own(Method):
    name = "{name}"
"""
TERM = """
from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.training.methods import Method

class TermSettings(MethodSettings):
    @property
    def term(self):
        return "certainty"

class Certainty(Method):
    name = "certainty"

    def add_weights(self, weights, shares, objective):
        weights["certainty"] = shares.policy

    def term(self, inputs):
        return -inputs.batch.logprobs
"""


@pytest.mark.parametrize(
    "file",
    [
        *("trainer.py", "rollout.py", "update.py", "step_batch.py", "prompt_loader.py"),
        "methods/__init__.py",
        *(f"objective/{path.name}" for path in (ROOT / "objective").glob("*.py")),
        *(f"checkpoint/{path.name}" for path in (ROOT / "checkpoint").glob("*.py")),
    ],
)
def test_no_other_file_names_a_method(file):
    found = NAMES.findall((ROOT / file).read_text())
    assert not found


def test_a_file_is_a_method_with_options(settings):
    entry = {"file": str(EXAMPLE), "options": {"factor": 3.0}}
    run = settings(methods=[entry])
    assert settings(methods=[str(EXAMPLE)]).methods[0].options == {}
    _, _, batch = capture_step(make_trainer(run))
    for part in batch.layout.split(batch.values["token_factors"]):
        assert torch.equal(part, torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0, 1.0])[: len(part)])
    run.save(run.run_dir / "config.yaml")  # as load_settings reads it again
    assert "first_tokens.py" in (run.run_dir / "config.yaml").read_text()
    for name in ("replay", "kl", "nothing"):  # a name is of a method with its settings in its file
        with pytest.raises(UserError, match=f"there is no method {name}.* the path of a .py file"):
            build_methods(settings(methods=[name]))


def test_a_term_of_a_file_trains_groups_with_equal_rewards(settings, tmp_path):
    (tmp_path / "own.py").write_text(TERM)
    (tmp_path / "equal.py").write_text(re.sub("return len.*", "return 1.0", TASK))
    norms = []
    for methods in ([], [str(tmp_path / "own.py")]):
        trainer = make_trainer(settings(task=str(tmp_path / "equal.py"), methods=methods))
        norms.append(trainer.step()["grad_norm"])
    assert norms[0] == 0 < norms[1]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x = 1", {}, "must define one subclass of Method, not none"),
        (EMPTY.format(name="replay"), {}, "has the name 'replay' of another method"),
        (EMPTY.format(name="a b"), {}, "Own.name must be a word"),
        (EMPTY.format(name="own"), {"scale": 1}, "scale"),
        ("import nothing_of_this_name", {}, "method file .* cannot be loaded: line 1"),
    ],
)
def test_a_wrong_file_is_refused(settings, tmp_path, text, options, message):
    (tmp_path / "own.py").write_text(text)
    run = settings(methods=[{"file": str(tmp_path / "own.py"), "options": options}])
    with pytest.raises(UserError, match=message):
        build_methods(run)


REPEATED = {"policy": {"dtype": "float32", "engine": "repeated"}}
REPLAY, ZOOM = {"objective": {"replay": {}}}, {"task_options": {"environment": "zoom"}}
CROPS = {"methods": ["crop_rollouts"], "data": {"train": "embedded:tiny_words:cells=2"}}
PAPO, CROP = {"perception": {"kl_coef": 0.01}}, {"distillation": {"teacher_prompt": "crop"}}
POINTS = {"task": "pointing", "data": {"train": "embedded:grounding"}}
POINTS |= {"objective": {"distillation": {"teacher_prompt": "mask", "boxes": "own"}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["counterfactual"], **REPEATED}, "needs policy.engine=shared"),
        ({"methods": ["visual_credit"], **REPEATED}, "needs policy.engine=shared"),
        ({"methods": ["counterfactual"], **REPLAY}, "does not work with objective.replay"),
        ({"methods": ["revision"], **REPLAY}, "does not work with objective.replay"),
        (
            {"methods": ["revision"], "task": "ocr", **ZOOM},
            "no effect on episodes of an environment",
        ),
        ({"methods": ["crop_rollouts"]}, "crop_rollouts has no effect: no training example has"),
        (CROPS | {"objective": {"beta": 0.1}}, "does not work with objective.beta: remove one"),
        (CROPS | {"objective": PAPO}, "does not work with objective.perception: remove one"),
        (CROPS | {"methods": ["crop_rollouts", "revision"]}, "not work with revision: remove one"),
        ({"objective": CROP}, "teacher_prompt=crop has no effect: no training example"),
        (POINTS, "boxes=own has no effect: no gold answer of the task is boxes"),
    ],
)
def test_what_a_method_cannot_do_is_refused_before_the_run(settings, changes, message):
    with pytest.raises(UserError, match=message):
        make_trainer(settings(**changes))
