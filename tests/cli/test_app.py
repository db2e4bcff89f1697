"""The commands as a user meets them: what they print, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fails, run

from vlm_grpo.cli import validation
from vlm_grpo.cli.validation import exploits
from vlm_grpo.config.run import load_settings, recipe_names
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.registry import load_task, task_names

TASK = '''
import time

from vlm_grpo.task import Task, metric, reward


class Letters(Task):
    """Name a letter."""

    primary_metric = "right"

    def parse(self, text, example):
        {parse}

    def write(self, answer, example):
        return answer

    @reward(weight=2.0)
    def right(self, answer, example):
        {right}
'''


def lines(path: Path, *rows: dict | str) -> Path:
    text = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    """Two counting rows without images, whose answers are 3 and 5."""
    rows = [{"id": f"r{n}", "question": "How many?", "answer": n} for n in (3, 5)]
    return lines(tmp_path / "data.jsonl", *rows)


@pytest.fixture
def letters(tmp_path):
    """Writes a task for rows whose answers are letters, with a parser and a reward as given."""
    rows = [{"id": letter, "question": "Which?", "answer": letter} for letter in "ab"]
    data = lines(tmp_path / "letters.jsonl", *rows)

    def _letters(
        parse: str = "return text if len(text) == 1 else None",
        right: str = "return float(answer == example.answer)",
    ) -> tuple[Path, str, Path]:
        path = tmp_path / "letters.py"
        path.write_text(TASK.format(parse=parse, right=right))
        return path, "--data", data

    return _letters


# The program.


def test_help_teaches_with_examples(capsys):
    status, out, _ = run(capsys, "--help")

    assert status == 0
    for word in ("train", "evaluate", "validate", "score", "tasks", "vlm-grpo train quickstart"):
        assert word in out


@pytest.mark.parametrize("command", ["train", "evaluate", "validate", "score"])
def test_each_commands_help_has_an_example(capsys, command):
    status, out, _ = run(capsys, command, "--help")

    assert status == 0
    assert f"\n  vlm-grpo {command} " in out


def test_the_program_starts_without_the_heavy_libraries():
    code = (
        "import sys, vlm_grpo.cli; "
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    # numpy's and pycocotools' users may need scipy; models need torch: neither is for --help.
    assert done.stdout.strip() in ("set()", "{'scipy'}")


def test_the_module_runs_as_a_launcher_starts_it():
    command = [sys.executable, "-m", "vlm_grpo.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.startswith("vlm-grpo ")


def test_tasks_lists_tasks_and_recipes(capsys):
    _, out, _ = run(capsys, "tasks")

    assert all(name in out for name in (*task_names(), *recipe_names()))
    assert "Count the named objects in one image" in out


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_wrong_setting_is_one_message(capsys, command):
    message = fails(capsys, command, "counting", "optim.learning_rate=1")

    assert message.startswith("error: recipe counting has wrong settings:")
    assert "did you mean optim.lr?" in message


def test_debug_shows_the_traceback_wherever_it_stands(capsys):
    for arguments in (["train", "nothing", "--debug"], ["--debug", "train", "nothing"]):
        status, _, err = run(capsys, *arguments)
        assert status == 2
        assert "Traceback" in err
        assert "there is no recipe 'nothing'" in err


def test_an_unknown_option_or_command_is_one_message(capsys):
    assert "--foo" in fails(capsys, "train", "counting", "--foo")
    assert "fly" in fails(capsys, "fly")


def test_train_takes_another_task_and_names_its_bad_data(capsys, letters, tmp_path):
    path, _, _ = letters()
    row = {"id": 1, "question": "?", "images": ["none.png"], "answer": "a"}
    broken = lines(tmp_path / "broken.jsonl", row)
    given = [f"data.train={broken}", "data.eval=null", "evaluation.every=0"]
    given.append(f"output_dir={tmp_path}")

    message = fails(capsys, "train", "counting", *given, "--task", path)

    assert f"{broken}:1: image none.png is missing" in message


def test_evaluate_names_a_checkpoint_that_is_not_there(capsys, tmp_path):
    message = fails(capsys, "evaluate", "counting", f"checkpoint={tmp_path / 'none'}")

    assert str(tmp_path / "none") in message


# validate


@pytest.mark.parametrize(
    "arguments",
    [
        ["counting"],
        ["grounding"],
        ["ocr"],
        ["counting", "tags=true"],
        ["grounding", "tags=true", "thinking=true"],
        ["grounding", "several=true", "absent=true"],
        ["ocr", "tags=true", "weights.format=0.1", "weights.length=0.1"],
        ["pointing", "--data", "embedded:grounding"],
        ["detection", "--data", "embedded:grounding"],
    ],
    ids=" ".join,
)
def test_the_built_in_tasks_are_sound_on_embedded_data(capsys, arguments):
    status, out, err = run(capsys, "validate", *arguments)

    assert (status, err) == (0, "")
    assert "gold answers earn 1.000 of the full reward" in out
    assert "an empty text earns at most 0.000" in out
    assert "is sound on this data" in out


def test_a_task_of_the_users_own_is_sound(capsys, letters):
    status, out, _ = run(capsys, "validate", *letters())

    assert status == 0
    assert "Letters is sound on this data" in out


def test_a_task_whose_gold_answer_scores_nothing_is_told(capsys, letters):
    message = fails(capsys, "validate", *letters(parse="return None"))

    assert "2 gold answers that do not earn the full reward" in message
    assert "a: 'a' holds no answer and earns right 0.000" in message


def test_a_task_that_pays_for_hedging_is_told(capsys, letters):
    message = fails(
        capsys,
        "validate",
        *letters(parse="return text", right="return float(example.answer in answer)"),
    )

    assert "two answers with or between earns 1.000, above 0.5, on a: 'a or b'" in message


def test_a_reward_that_raises_is_told_with_its_traceback(capsys, letters):
    _, _, err = run(capsys, "validate", *letters(right="return 1 / 0"))

    assert "right failed on example 'a'" in err
    assert "ZeroDivisionError" in err


def test_a_parser_that_raises_on_a_hostile_text_is_told(capsys, letters):
    parse = "text.encode('utf-8'); return text if len(text) == 1 else None"
    message = fails(capsys, "validate", *letters(parse=parse))

    assert "half a surrogate pair: it raised UnicodeEncodeError" in message


def test_a_slow_parser_is_told(capsys, letters):
    # Twice what is allowed, on long texts alone.
    parse = "time.sleep(0.02 * (len(text) > 1000)); return text if len(text) == 1 else None"
    message = fails(capsys, "validate", *letters(parse=parse))

    assert "100,000 letters: it took" in message


def test_a_task_without_embedded_data_asks_for_data(capsys, letters):
    path, _, _ = letters()

    assert "give it by --data" in fails(capsys, "validate", path)


def test_validate_decodes_every_image(capsys, tmp_path):
    path = write_examples(make_shapes.draw_examples("counting", 2), tmp_path / "made", "rows.jsonl")
    image = next((tmp_path / "made" / "images").iterdir())
    image.write_bytes(image.read_bytes()[:-200])

    message = fails(capsys, "validate", "counting", "--data", path)

    assert "1 images that cannot be decoded" in message
    assert image.name in message


def test_exploits_with_tags_hold_the_gold_answer_outside_of_them():
    first, second = make_shapes.draw_examples("counting", 2)
    texts = {e.name: e.text for e in exploits(load_task("counting", tags=True), first, second)}

    assert texts["the answer without tags"] == str(first.answer)
    assert texts["an unclosed tag"] == f"<answer>{first.answer}"


def test_a_reward_that_hangs_is_told(capsys, data, tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "REWARD_TIMEOUT", 0.1)
    task = TASK.format(parse="return text", right="time.sleep(60)")
    (tmp_path / "hangs.py").write_text(task.replace("return answer", "return str(answer)"))
    status, _, message = run(capsys, "validate", tmp_path / "hangs.py", "--data", data)
    assert status == 2
    assert "right failed on example 'r3'" in message
    assert "longer than its limit of 0.1 s" in message


def test_an_answer_that_is_written_as_no_text_is_told(capsys, data, tmp_path):
    (tmp_path / "number.py").write_text(TASK.format(parse="return text", right="return 1.0"))
    message = fails(capsys, "validate", tmp_path / "number.py", "--data", data)
    assert "2 gold answers of which write makes no text:\n  - r3: 3" in message


def test_a_task_that_is_not_there_is_named_before_its_data(capsys):
    assert "there is no task file nope.py" in fails(capsys, "validate", "nope.py")


# score


@pytest.mark.parametrize("option", ["tags=true", "frame=permille"])
def test_what_a_flag_says_is_no_option(capsys, data, option):
    given = ["counting", option, "--data", data, "--predictions", "x"]
    assert f"{option.partition('=')[0]} is no option" in fails(capsys, "score", *given)


def test_score_prints_a_row_for_each_example_and_the_total(capsys, data, tmp_path):
    predictions = lines(
        tmp_path / "out.jsonl",
        {"id": "r5", "output": "<answer>4</answer>"},
        {"id": "r3", "output": "<answer>three</answer>"},
    )

    status, out, _ = run(
        capsys, "score", "counting", "--data", data, "--predictions", predictions, "--json"
    )
    first, second, last = map(json.loads, out.splitlines())

    assert status == 0
    assert (first["id"], first["answer"], first["rewards"]["exact"]) == ("r3", 3, 1.0)
    assert (second["id"], second["metrics"]["absolute_error"]) == ("r5", 1.0)
    assert set(first) == {"id", "answer", "rewards", "metrics"}
    assert last["total"]["n"] == 2
    assert last["total"]["rewards"]["exact"] == 0.5
    assert last["total"]["metrics"]["absolute_error"] == 0.5


def test_without_tags_the_whole_output_is_read(capsys, data, tmp_path):
    rows = [{"id": f"r{n}", "output": "3"} for n in (3, 5)]
    given = ["counting", "--data", data, "--predictions", lines(tmp_path / "out.jsonl", *rows)]

    _, with_tags, _ = run(capsys, "score", *given, "--json")
    _, without, _ = run(capsys, "score", *given, "--json", "--no-tags")

    assert json.loads(with_tags.splitlines()[-1])["total"]["answered"] == 0
    assert json.loads(without.splitlines()[-1])["total"]["rewards"]["exact"] == 0.5


def test_a_table_is_for_people(capsys, data, tmp_path):
    rows = [{"id": f"r{n}", "output": "3"} for n in (3, 5)]
    predictions = lines(tmp_path / "out.jsonl", *rows)

    _, out, _ = run(
        capsys, "score", "counting", "--no-tags", "--data", data, "--predictions", predictions
    )

    assert "exact" in out
    assert "all 2" in out
    assert "0.500" in out


@pytest.fixture
def boxes(tmp_path):
    """One grounding row on an 84-pixel image, with the gold box 21, 21, 63, 63."""
    folder = tmp_path / "made"
    (example,) = make_shapes.draw_examples("grounding", 1)
    path = write_examples([example], folder, "rows.jsonl")
    row = json.loads(path.read_text())
    lines(path, {**row, "answer": {"boxes": [[21, 21, 63, 63]]}})
    return path, row["id"]


@pytest.mark.parametrize(
    ("frame", "output", "more"),
    [
        ("original", "[21, 21, 63, 63]", {}),
        ("permille", "[250, 250, 750, 750]", {}),
        ("qwen2_vl", "<|box_start|>(250,250),(750,750)<|box_end|>", {}),
        ("resized", "[42, 42, 126, 126]", {"seen": [[168, 168]]}),
    ],
)
def test_boxes_are_read_in_their_frame(capsys, boxes, tmp_path, frame, output, more):
    path, identity = boxes
    predictions = lines(tmp_path / "out.jsonl", {"id": identity, "output": output, **more})
    given = ["grounding", "--no-tags", "--data", path, "--predictions", predictions]

    _, out, _ = run(capsys, "score", *given, "--frame", frame, "--json")

    assert json.loads(out.splitlines()[0])["rewards"]["iou"] == pytest.approx(1.0)


def test_the_resized_frame_needs_the_size_that_the_model_saw(capsys, boxes, tmp_path):
    path, identity = boxes
    for wrong in ({}, {"seen": [168, 168]}, {"seen": [[0, 168]]}, {"seen": []}):
        predictions = lines(tmp_path / "out.jsonl", {"id": identity, "output": "x", **wrong})
        given = ["grounding", "--data", path, "--predictions", predictions, "--frame", "resized"]
        assert 'it needs "seen"' in fails(capsys, "score", *given)


def test_an_unknown_frame_names_the_nearest(capsys, data):
    given = ["counting", "--data", data, "--predictions", "x", "--frame", "permil"]

    assert "did you mean permille?" in fails(capsys, "score", *given)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (['{"id": "r3", "output": "3"}'], "no prediction for id 'r5'"),
        (['{"id": "r3", "output": "3"}'] * 2, "id 'r3' has a prediction already"),
        (['{"id": "r9", "output": "3"}'], "no example has the id 'r9'"),
        (['{"id": "r3"}'], 'a prediction is {"id": …, "output": text}'),
        (['{"id": "r3", "output": 3}'], 'a prediction is {"id": …, "output": text}'),
        (['{"id": "r3", '], "the line is not JSON"),
        ([], "no prediction for id 'r3'"),
    ],
)
def test_predictions_that_do_not_match_the_examples_are_told(capsys, data, tmp_path, rows, reason):
    predictions = lines(tmp_path / "out.jsonl", *rows)
    message = fails(capsys, "score", "counting", "--data", data, "--predictions", predictions)

    assert reason in message
    assert str(predictions) in message


def test_a_predictions_file_that_is_not_there_is_named(capsys, data):
    given = ["counting", "--data", data, "--predictions", "none.jsonl"]

    assert "none.jsonl cannot be read" in fails(capsys, "score", *given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "model has no value: add model="),
        (["--frame", "permille"], "--frame goes with --predictions"),
        (["--task", "ocr"], "a benchmark has its own task"),
        (["--predictions", "p.jsonl", "checkpoint=runs"], "leave out checkpoint="),
        (["--predictions", "p.jsonl", "--frame", "permil"], "did you mean permille"),
        (["model=embedded", "checkpoint=nowhere"], "nowhere is no folder"),
        (["model=embedded", "task_options.tagz=true"], "unknown option tagz"),
    ],
)
def test_evaluating_a_benchmark_says_what_does_not_go_together(capsys, more, message):
    assert message in fails(capsys, "evaluate", "tallyqa", "--data", "embedded:counting", *more)


def test_a_checkpoint_says_which_model_it_is_of_and_how_it_was_asked(tmp_path, capsys, monkeypatch):
    checkpoint = tmp_path / "step-3"
    trained = ["model=a/model", "task_options.tags=true", "policy.max_pixels=5000"]
    load_settings("counting", trained).save(checkpoint / "config.yaml")
    seen = []
    monkeypatch.setattr(
        "vlm_grpo.evaluation.evaluate.evaluate_benchmark", lambda *given: seen.append(given)
    )
    rows = ["evaluate", "tallyqa", "--data", "embedded:counting", f"checkpoint={checkpoint}"]
    run(capsys, *rows, "policy.dtype=float32")
    (_, settings, where, _) = seen[0]
    assert where == checkpoint
    assert (settings.model, settings.task_options) == ("a/model", {"tags": True})
    assert (settings.policy.max_pixels, settings.policy.dtype) == (5000, "float32")
    assert (settings.name, settings.data.eval) == ("benchmark-tallyqa", "embedded:counting")
