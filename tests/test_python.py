"""The Python interface: lazy imports, and runs whose task and data are Python objects."""

import io
import pkgutil
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from PIL import Image
from small_runs import assert_same_weights, small_run

import vlm_grpo
from vlm_grpo import (
    Example,
    Settings,
    Trainer,
    TrainResult,
    UserError,
    evaluate,
    export,
    load_policy,
    load_settings,
    plan,
    predict,
    reward,
    train,
)
from vlm_grpo.tasks.counting import Counting

COLORS = ("red", "lime", "blue", "black")


class Brightness(Counting):
    """Count the color channels that are on, up to a number."""

    most: int = 1

    @reward()
    def exact(self, answer: int, example: Example) -> float:
        return float(answer == min(example.answer, self.most))


def make_rows(count: int, encode: bool = False) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        image: Any = Image.new("RGB", (84, 84 + number), COLORS[number % 4])
        if encode:
            image.save(buffer := io.BytesIO(), "PNG")
            image = buffer.getvalue()
        rows.append({"images": [image], "question": "How many?", "answer": number % 2})
    return rows


ROWS, HELD_OUT = make_rows(8), make_rows(4, encode=True)


def make_settings(folder: Path, **optim: Any) -> Settings:
    changes: dict[str, Any] = {
        "data": {"train": "python", "eval": "python", "train_limit": None},
        "rollout": {"num_generations": 2, "max_completion_length": 2},
        "optim": {"lr": 1e-3, "prompts_per_step": 2, **optim},
    }
    return small_run(folder, Path("embedded"), task="python", **changes)


OBJECTS: dict[str, Any] = {"task": Brightness, "data": ROWS, "held_out": HELD_OUT}
"""The arguments of ``train``."""


def test_what_is_imported_loads_no_more_than_it_needs():
    program = (
        "import sys; before = {*sys.modules}\n"
        "import vlm_grpo\n"
        "loaded = {*sys.modules} - before\n"
        "print(len(loaded))\n"
        "print({name.partition('.')[0] for name in loaded} - sys.stdlib_module_names)\n"
        "from vlm_grpo import Example, Settings, Task, load_settings, load_task, metric, reward\n"
        "load_task('ocr'), load_settings('counting')\n"
        "print({'scipy', 'pycocotools'} & {*sys.modules})\n"
        "import vlm_grpo.data\n"
        "print({'torch', 'transformers', 'datasets'} & {*sys.modules})"
    )
    count, *modules = run_python("-c", program).splitlines()
    assert int(count) < 20  # the time of an import, in a unit that depends on no machine
    assert modules == ["{'vlm_grpo'}", "set()", "set()"]


def test_every_name_is_listed_and_importable_and_is_no_modules():
    names = {*vars(vlm_grpo)["__all__"]}
    assert names <= {*dir(vlm_grpo)}
    for name in names - {"__version__"}:
        assert getattr(vlm_grpo, name).__module__.startswith("vlm_grpo."), name
    misspelled = "trian"
    with pytest.raises(AttributeError, match="module 'vlm_grpo' has no attribute 'trian'"):
        getattr(vlm_grpo, misspelled)
    # Importing a module sets it as an attribute of its package, in place of the function.
    assert not names & {module.name for module in pkgutil.iter_modules(vlm_grpo.__path__)}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run of four steps with a task object and rows in memory."""
    settings = make_settings(tmp_path_factory.mktemp("full"))
    return train(settings, **{**OBJECTS, "task": Brightness(most=9)})


def test_a_run_resumes_with_the_same_objects_and_with_no_other_task(result, tmp_path):
    given = {**OBJECTS, "task": Brightness(most=9)}
    train(make_settings(tmp_path, max_steps=2), **given)
    more = load_settings(tmp_path / "runs/run/config.yaml", ["resume=true", "optim.max_steps=4"])
    resumed = train(more, **{**given, "data": make_rows(8)})  # equal rows are enough
    assert_same_weights(resumed.checkpoint, result.checkpoint)

    class Other(Brightness):
        pass

    settings = load_settings(result.run_dir / "config.yaml", ["resume=true"])
    with pytest.raises(UserError, match=r"task was .*Brightness.* and is now .*<class .*Other>"):
        train(settings, **{**OBJECTS, "task": Other})


def test_evaluation_prediction_and_export_take_objects_and_print_nothing(result, tmp_path, capsys):
    settings = load_settings(result.run_dir / "config.yaml")
    found: Any = evaluate(settings, result.checkpoint, task=Brightness, held_out=HELD_OUT)
    assert "vlm-grpo evaluate" not in str(result)  # no command has these rows
    assert found.metrics == result.after.metrics
    assert found.path.is_file()
    folder = export(result.run_dir, tmp_path / "model")
    image = Image.new("RGB", (84, 90), "red")
    trained: Any = predict(result.run_dir, image, "How many?")
    # The run computes in float32 and generates two tokens, which the exported model does not know.
    settings = {"policy.dtype": "float32", "rollout.max_completion_length": 2}
    exported = predict(folder, image, "How many?", task=Brightness(most=9), overrides=settings)
    assert (trained.text, trained.answer) == (exported.text, exported.answer)
    assert trained.picture.height >= image.height  # a caption adds to it
    assert capsys.readouterr().out == ""


PROGRAM = """
with open("ran", "a") as file:
    file.write("x")
from own import Filed
import vlm_grpo
from vlm_grpo.tasks.counting import Counting

if __name__ == "__main__":  # a class that no file defines

    class Own(Counting):
        pass


run = vlm_grpo.load_settings("counting", {
    "name": "run", "optim.max_steps": 1, "optim.prompts_per_step": 2, "optim.warmup_steps": 0,
    "rollout.num_generations": 2, "rollout.reward_workers": 1,
    "data.train_limit": 4, "data.eval_limit": 2, "logging.trackers": [],
})
vlm_grpo.train(run, task=Filed)
vlm_grpo.evaluate(run, "runs/run", task=Filed)
try:
    vlm_grpo.train(run.model_copy(update={"name": "refused"}), task=Own)
except vlm_grpo.UserError as error:
    print(error)
changes = {"name": "own", "rollout.reward_workers": 0}
settings = vlm_grpo.load_settings("runs/run/config.yaml", changes)
vlm_grpo.train(settings, task=Own)
vlm_grpo.predict("runs/own", "image.png", "How many?")
"""


@pytest.mark.slow
def test_a_plain_script_runs_once_whatever_it_calls(tmp_path):
    (tmp_path / "own.py").write_text(
        "from vlm_grpo.tasks.counting import Counting\nclass Filed(Counting): pass\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    ROWS[0]["images"][0].save(tmp_path / "image.png")
    assert (
        "Own cannot be sent to worker processes (Own is defined in the program, which workers do "
        "not run): define it in a file of its own, or set rollout.reward_workers=0\n"
    ) in run_python("program.py", folder=tmp_path)
    assert (tmp_path / "ran").read_text() == "x"


def test_arguments_of_another_type_and_a_task_without_a_weighted_reward_are_refused(tmp_path):
    values: Any = {"task": "counting"}
    unknown: Any = None
    trainer = partial(Trainer, policy=unknown, task=unknown, train_examples=[])
    for call in (train, evaluate, plan, load_policy, trainer):
        with pytest.raises(UserError, match="settings must be Settings: use load_settings"):
            unwrap(call)(values)  # without the type checker of the tests
    with pytest.raises(UserError, match="run must be the folder or the name of a run, not dict"):
        export(values, tmp_path / "out")
    memory: Any = 24
    with pytest.raises(UserError, match="gpu must be text such as '24GB', not 24"):
        plan(load_settings("counting"), memory)
    with pytest.raises(UserError, match="no reward has a weight"):
        train(make_settings(tmp_path), **{**OBJECTS, "task": Brightness(weights={"exact": 0.0})})
