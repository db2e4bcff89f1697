"""``vlm-grpo evaluate TASK --predictions``: scores, formats, wrong files."""

from __future__ import annotations

import json

import pytest
from commands import fails, run, write_jsonl

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.eval.foreign import LAYOUTS
from vlm_grpo.task.coordinates import FRAMES


@pytest.fixture
def predicted_threes(tmp_path):
    """The output 3 for both rows of ``counting_data``, without tags."""
    rows = [{"id": f"r{n}", "output": "3"} for n in (3, 5)]
    return write_jsonl(tmp_path / "out.jsonl", *rows)


def test_help_names_every_format_and_frame(capsys):
    _, out, _ = run(capsys, "evaluate", "--help")

    assert all(name in out for name in ("predictions", *LAYOUTS, *FRAMES))


@pytest.mark.parametrize("option", ["tags=true", "frame=permille"])
def test_an_option_that_has_a_flag_is_refused(capsys, option):
    message = fails(capsys, "evaluate", "counting", option, "--data", "d", "--predictions", "x")

    assert f"{option.partition('=')[0]} is not a task option with --predictions" in message


def test_json_has_one_row_per_example_and_the_total(capsys, counting_data, tmp_path):
    predictions = write_jsonl(
        tmp_path / "out.jsonl",
        {"id": "r5", "output": "<answer>4</answer>"},
        {"id": "r3", "output": "<answer>three</answer>"},
    )

    status, out, _ = run(
        capsys,
        "evaluate",
        "counting",
        "--data",
        counting_data,
        "--predictions",
        predictions,
        "--json",
    )
    first, second, last = map(json.loads, out.splitlines())

    assert status == 0
    assert (first["id"], first["answer"], first["rewards"]["exact"]) == ("r3", 3, 1.0)
    assert (second["id"], second["metrics"]["absolute_error"]) == ("r5", 1.0)
    assert set(first) == {"id", "answer", "rewards", "metrics"}
    assert last["total"]["n"] == 2
    assert last["total"]["rewards"]["exact"] == 0.5
    assert last["total"]["metrics"]["absolute_error"] == 0.5


@pytest.mark.parametrize(
    ("output", "flags", "answered"),
    [
        ("3", [], 2),
        (
            "<answer>3</answer>",
            [],
            2,
        ),  # as on benchmarks: tags are read if present
        ("<think>4</think><answer>3</answer>", [], 2),
        ("3", ["--tags"], 0),
        ("<answer>3</answer>", ["--tags"], 2),
        ("<answer>3</answer>", ["--no-tags"], 0),
    ],
)
def test_an_answer_is_read_with_and_without_tags(
    capsys, counting_data, tmp_path, output, flags, answered
):
    rows = [{"id": f"r{n}", "output": output} for n in (3, 5)]
    given = ["--data", counting_data, "--predictions", write_jsonl(tmp_path / "p.jsonl", *rows)]

    _, out, _ = run(capsys, "evaluate", "counting", *given, *flags, "--json")
    total = json.loads(out.splitlines()[-1])["total"]

    assert total["answered"] == answered
    assert total["rewards"]["exact"] == answered / 4  # 3 is right for one of two rows


def test_outputs_that_cannot_be_read_are_shown(capsys, counting_data, tmp_path):
    rows = [{"id": "r3", "output": "I see three or so"}, {"id": "r5", "output": "3 or 4"}]
    given = ["--data", counting_data, "--predictions", write_jsonl(tmp_path / "p.jsonl", *rows)]

    _, scored, _ = run(capsys, "evaluate", "counting", *given)
    _, evaluated, _ = run(capsys, "evaluate", "tallyqa", *given)

    for out in (scored, evaluated):
        assert "most outputs hold no answer that can be read, for example 'I see three" in out
    assert "models were asked for: a number alone" in evaluated


def test_the_table_shows_means(capsys, counting_data, predicted_threes):
    given = ["counting", "--data", counting_data, "--predictions", predicted_threes, "--no-tags"]

    _, out, _ = run(capsys, "evaluate", *given)

    assert "exact" in out
    assert "all 2" in out
    assert "0.500" in out


@pytest.fixture
def grounding_data(tmp_path):
    """One grounding row on an 84-pixel image, with the gold box 21, 21, 63, 63; and its id."""
    (example,) = make_shapes.draw_examples("grounding", 1)
    path = write_examples([example], tmp_path / "made", "rows.jsonl")
    row = json.loads(path.read_text())
    write_jsonl(path, {**row, "answer": {"boxes": [[21, 21, 63, 63]]}})
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
def test_boxes_are_converted_from_their_frame(
    capsys, grounding_data, tmp_path, frame, output, more
):
    path, identity = grounding_data
    predictions = write_jsonl(tmp_path / "out.jsonl", {"id": identity, "output": output, **more})
    given = ["grounding", "--no-tags", "--data", path, "--predictions", predictions]

    _, out, _ = run(capsys, "evaluate", *given, "--frame", frame, "--json")

    assert json.loads(out.splitlines()[0])["rewards"]["iou"] == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{}, {"seen": [168, 168]}, {"seen": [[0, 168]]}, {"seen": []}])
def test_the_resized_frame_needs_the_resized_size(capsys, grounding_data, tmp_path, wrong):
    path, identity = grounding_data
    predictions = write_jsonl(tmp_path / "out.jsonl", {"id": identity, "output": "x", **wrong})
    given = ["grounding", "--data", path, "--predictions", predictions, "--frame", "resized"]

    assert '--frame resized needs "seen"' in fails(capsys, "evaluate", *given)


def test_an_unknown_frame_is_answered_with_the_nearest(capsys, counting_data):
    given = ["counting", "--data", counting_data, "--predictions", "x", "--frame", "permil"]

    assert "did you mean permille?" in fails(capsys, "evaluate", *given)


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
def test_predictions_that_do_not_match_the_examples_are_named(
    capsys, counting_data, tmp_path, rows, reason
):
    predictions = write_jsonl(tmp_path / "out.jsonl", *rows)
    given = ["counting", "--data", counting_data, "--predictions", predictions]
    message = fails(capsys, "evaluate", *given)

    assert reason in message
    assert str(predictions) in message


def test_a_missing_predictions_file_is_named(capsys, counting_data):
    given = ["counting", "--data", counting_data, "--predictions", "none.jsonl"]

    assert "none.jsonl cannot be read" in fails(capsys, "evaluate", *given)
