"""One question to a model: what is asked, what is read, and what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import fails, run
from PIL import Image

from vlm_grpo.config.run import load_settings
from vlm_grpo.data import load_examples
from vlm_grpo.deploy.predict import Prediction, Predictor, predict
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation.evaluate import evaluate_policy
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.rewards.scorer import RewardScorer
from vlm_grpo.types import Example


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def example_of(name: str) -> Example:
    """The first held-out example of an embedded task, its image in ``NAME.png``."""
    settings = load_settings(name, ["data.eval_limit=1"])
    task = load_task(name)
    (example,) = load_examples(f"embedded:{name}", task, settings.data, "eval")
    example.images[0].load().save(f"{name}.png")
    return example


def ask(name: str, **options: Any) -> Prediction:
    example = example_of(name)
    return predict("embedded", f"{name}.png", example.question, **options)


@pytest.mark.parametrize("name", ["counting", "grounding", "ocr"])
def test_the_answer_is_the_evaluations(name: str) -> None:
    # The recipes compute in float32.
    found = ask(name, task=name, overrides=("policy.dtype=float32",))
    settings = load_settings(name, ["data.eval_limit=1"])
    policy = load_policy(settings, training=False)
    task = load_task(name, frame=policy.frame)
    (row,) = evaluate_policy(policy, task, [example_of(name)], settings, RewardScorer()).rows
    assert found.completion.text == row["output"]
    assert found.answer == row["answer"]


def test_a_box_is_drawn_at_the_images_own_size(capsys: pytest.CaptureFixture[str]) -> None:
    example = example_of("grounding")
    status, out, _ = run(
        capsys, "predict", "embedded", "--image", "grounding.png", "--task", "grounding",
        "--question", example.question,
    )  # fmt: skip
    assert status == 0
    assert out.splitlines()[1].startswith("answer   ((")
    with Image.open("grounding-answer.png") as drawn, Image.open("grounding.png") as original:
        assert drawn.size == original.size
        assert (220, 38, 127) in {color for _, color in drawn.getcolors() or ()}  # #dc267f


def test_without_a_task_the_output_is_written_below_the_image() -> None:
    found = ask("counting")

    assert not found.has_task
    with Image.open("counting.png") as original:
        assert found.picture.height > original.height


def test_an_existing_picture_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    example = example_of("counting")
    command = ("predict", "embedded", "--image", "counting.png", "--question", example.question)

    pictures = [run(capsys, *command)[1].splitlines()[-1] for _ in range(2)]

    assert pictures == ["picture  counting-answer.png", "picture  counting-answer-2.png"]
    assert all(Path(line.split()[-1]).is_file() for line in pictures)


def test_an_image_may_be_a_path_bytes_or_a_pil_image() -> None:
    example = example_of("counting")
    predictor = Predictor("embedded", task="counting")
    data = Path("counting.png").read_bytes()
    with Image.open("counting.png") as image:
        found = [
            predictor(given, example.question)
            for given in ("counting.png", Path("counting.png"), data, image, [image])
        ]

    assert len({prediction.text for prediction in found}) == 1
    with pytest.raises(UserError, match="give at least one"):
        predictor([], example.question)


def test_settings_go_over_those_of_the_model() -> None:
    cut = ask("grounding", task="grounding", overrides=["rollout.max_completion_length=2"])
    assert (len(cut.completion.token_ids), cut.completion.stop) == (2, "length")


def test_a_truncated_output_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    example_of("grounding")
    _, out, _ = run(
        capsys, "predict", "embedded", "rollout.max_completion_length=2",
        "--image", "grounding.png", "--question", "the red circle", "--task", "grounding",
    )  # fmt: skip
    assert "truncated after 2 tokens: raise rollout.max_completion_length" in out
    assert "answer   none" in out


def test_a_parser_that_raises_is_named() -> None:
    Path("bad.py").write_text(
        "from vlm_grpo.task import Task, reward\n"
        "class Bad(Task):\n"
        "    'Raises.'\n"
        "    primary_metric = 'r'\n"
        "    def parse(self, text, example):\n"
        "        raise KeyError('oops')\n"
        "    def write(self, answer, example):\n"
        "        return answer\n"
        "    @reward()\n"
        "    def r(self, answer, example):\n"
        "        return 1.0\n"
    )
    with pytest.raises(UserError, match=r"parser failed on .*KeyError\('oops'\)"):
        ask("counting", task="bad.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "none.png"], "image none.png cannot be read: No such file"),
        (["--image", "text.png"], "corrupt or of a format other than"),
        (["--image", "thin.png"], "image thin.png cannot be seen by the model: absolute aspect"),
        (["--image", "a.png", "--task", "countin"], "did you mean counting?"),
        (["--image", "a.png", "--out", "a.png"], "a.png exists already"),
        (["--image", "a.png", "--out", "no/b.png"], "there is no folder no"),
        (["--image", "a.png", "--out", "b.txt"], "end the name in .png"),
        (["--image", "a.png", "optim.rl=1"], "did you mean optim.lr?"),
    ],
)
def test_what_is_wrong_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Image.new("RGB", (84, 84)).save("a.png")
    Image.new("RGB", (900, 3)).save("thin.png")  # 300 : 1; Qwen's resize takes up to 200 : 1
    Path("text.png").write_text("no image")
    assert message in fails(capsys, "predict", "embedded", "--question", "What?", *arguments)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "model ./nowhere: there is no such folder"),
        ("embeded", "there is no model or run 'embeded' (did you mean embedded?)"),
        ("empty", "holds no model, no adapter and no checkpoints"),
        ("stopped", "has no complete checkpoint"),
    ],
)
def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str], model: str, message: str) -> None:
    Image.new("RGB", (84, 84)).save("a.png")
    Path("empty").mkdir()
    Path("runs/stopped/checkpoints").mkdir(parents=True)
    assert message in fails(capsys, "predict", model, "--question", "What?", "--image", "a.png")
