"""``vlm-grpo predict``: what it prints, where it writes, and wrong arguments."""

from pathlib import Path

import pytest
from chat_model import ChatModel, get_images, serve
from commands import fails, run
from judge_server import Reply
from PIL import Image

from vlm_grpo.cli.common import find_weights
from vlm_grpo.data_scripts import make_shapes

(EXAMPLE,) = make_shapes.draw_examples("grounding", 1)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder with the image a.png of a grounding example."""
    monkeypatch.chdir(tmp_path)
    EXAMPLE.images[0].load().save("a.png")


def test_a_box_is_drawn_on_the_image_in_its_original_size_unless_it_is_truncated(succeed):
    given = ["embedded", "--image", "a.png", "--task", "grounding"]
    given += ["--question", EXAMPLE.question]
    out = succeed("predict", *given)
    assert out.splitlines()[1].startswith("answer   ((")
    with Image.open("a-answer.png") as drawn, Image.open("a.png") as original:
        assert drawn.size == original.size
        assert (220, 38, 127) in {color for _, color in drawn.getcolors() or ()}  # #dc267f
    out = succeed("predict", *given, "rollout.max_completion_length=2")
    assert "truncated after 2 tokens: raise rollout.max_completion_length" in out
    assert "answer   none" in out


def test_commands_print_which_checkpoint_a_run_means(finished, succeed):
    name, given = str(finished), ["--question", "How many?", "--task", "counting"]
    newest = f"checkpoint {finished / 'checkpoints/step-3'}, the newest of its run\n"
    assert newest in succeed("export", name, "exported", "--adapter")
    assert newest in succeed("predict", name, *given)
    assert "step-2\n" in succeed("predict", f"{name}@2", *given)
    assert "checkpoint" not in succeed("predict", f"{name}/checkpoints/step-2", *given)
    assert find_weights(name) == finished / "checkpoints/step-3"  # loaded is what was printed


def test_an_existing_picture_is_not_overwritten(capsys):
    given = ["predict", "embedded", "--image", "a.png", "--question", "How many?"]
    shown = [run(capsys, *given)[1].splitlines() for _ in range(2)]
    pictures = ["picture  a-answer.png", "picture  a-answer-2.png"]
    assert [lines[-1] for lines in shown] == pictures
    assert not [line for line in shown[0] if line.startswith("answer")]
    with Image.open("a.png") as original, Image.open("a-answer-2.png") as drawn:
        assert drawn.height > original.height  # without a task, the output stands below it


def test_a_prompt_takes_no_image_or_the_options_of_an_answer(succeed, capsys):
    given = ["predict", "embedded", "--task", "counting", "--question", "How many circles?"]
    assert [line.split()[0] for line in succeed(*given).splitlines()] == ["output", "answer"]
    assert "--out needs an image" in fails(capsys, *given, "--out", "b.png")
    options = '{"options": ["cat", "dog"], "answer": "cat"}'
    given = ["--image", "a.png", "--question", "What?", "--task", "choice", "--answer", options]
    assert "answer   " in succeed("predict", "embedded", *given)


def test_a_model_behind_an_address_answers(capsys):
    model = ChatModel(lambda text, image: '{"bbox_2d": [125, 250, 500, 750]}')
    given = ["--image", "a.png", "--task", "grounding", "--question", "the red circle"]
    with serve(model) as server:
        known = run(capsys, "predict", "embedded", *given, "--server", server.address)
        options = ["--server", server.address, "--frame", "permille", "--served-model", "policy"]
        unknown = run(capsys, "predict", "none", *given, *options)
        model.fail = lambda text, earlier: Reply(status=400, body=b"too long")
        message = fails(capsys, "predict", "none", *given, "--server", server.address)
    assert [known[0], unknown[0], known[2], unknown[2]] == [0, 0, "", ""]
    with Image.open("a.png") as original, Image.open("a-answer-2.png") as drawn:
        assert drawn.size == original.size
        assert get_images(model.bodies[1])[0].size == original.size == (84, 84)
    assert "answer   ((10.5, 21.0, 42.0, 63.0" in unknown[1]  # of 84 pixels
    assert "the server gave no output for 1 example:\n  - example question: http" in message
    assert "status 400 Bad Request: too long\nif a prompt is too long" in message
    assert "saved" not in message
