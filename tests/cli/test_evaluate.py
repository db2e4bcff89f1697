"""``vlm-grpo evaluate``: options, settings of a checkpoint, scores of files of outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_model import ChatModel, serve
from commands import fails, run, write_jsonl
from judge_server import Reply

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.eval.outputs import LAYOUTS
from vlm_grpo.serve.chat import Endpoint
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.utils import http_json

ROWS = ["--data", "embedded:counting"]


def test_a_missing_checkpoint_is_named(capsys, tmp_path):
    message = fails(capsys, "evaluate", "counting", "--checkpoint", tmp_path / "none")

    assert f"checkpoint {tmp_path / 'none'} is not a folder" in message


@pytest.mark.parametrize("given", ["runs/mine", "mine"])
def test_the_newest_checkpoint_of_a_run_is_evaluated(capsys, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    newest = Path("runs/mine/checkpoints/step-10")
    for folder in (newest, newest.with_name("step-2")):
        load_settings("counting").save(folder / "config.yaml")
    calls = []
    monkeypatch.setattr(
        "vlm_grpo.eval.benchmark.evaluate_benchmark", lambda *given: calls.append(given)
    )
    _, out, _ = run(capsys, "evaluate", "tallyqa", *ROWS, "--checkpoint", given)
    assert f"checkpoint {newest}, the newest of its run" in out
    assert calls[0][2] == newest


def test_a_run_without_checkpoints_is_one_message(capsys, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    message = fails(capsys, "evaluate", "counting", "--checkpoint", tmp_path)

    assert f"{tmp_path} has no complete checkpoint" in message


def test_the_name_of_a_benchmark_without_rows_says_what_to_give(capsys):
    message = fails(capsys, "evaluate", "refcoco", "model=embedded")

    assert "refcoco is a benchmark" in message
    assert "python -m vlm_grpo.data_scripts.refcoco --out refcoco.jsonl" in message
    assert "vlm-grpo evaluate refcoco --data refcoco.jsonl model=" in message


@pytest.mark.parametrize("arguments", [["counting"], ["tallyqa", *ROWS, "model=embedded"]])
def test_a_checkpoint_given_as_a_setting_is_answered_with_the_option(capsys, arguments):
    message = fails(capsys, "evaluate", *arguments, "checkpoint=runs/a/checkpoints/step-3")

    assert message == (
        "error: checkpoint=runs/a/checkpoints/step-3 is not a setting: "
        "write --checkpoint runs/a/checkpoints/step-3\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model has no value: add model="),
        (["--frame", "permille"], "--frame needs --predictions"),
        (["--task", "ocr"], "a benchmark has its own task"),
        (["--format", "r1_v"], "--format needs --predictions"),
        (["--predictions", "p.jsonl", "--format", "r1v"], "did you mean r1_v"),
        (["--predictions", "p.jsonl", "--split", "tset"], "no split 'tset' (did you mean test?)"),
        (["model=embedded", "--split", "val"], "its splits are test"),
        (["--predictions", "p.jsonl", "--checkpoint", "runs"], "leave out --checkpoint"),
        (["--predictions", "p.jsonl", "--frame", "permil"], "did you mean permille"),
        (["model=embedded", "--checkpoint", "nowhere"], "nowhere is not a folder"),
        (["model=embedded", "task_options.tagz=true"], "unknown option tagz"),
    ],
)
def test_options_that_exclude_each_other_are_one_message(capsys, arguments, message):
    assert message in fails(capsys, "evaluate", "tallyqa", *ROWS, *arguments)


@pytest.mark.parametrize("option", [["--split", "val"], ["--predictions", "p.jsonl"]])
def test_options_of_a_benchmark_need_its_rows(capsys, option):
    assert "give --data" in fails(capsys, "evaluate", "counting", *option)


def test_a_benchmark_takes_model_and_prompt_settings_from_the_checkpoint(
    tmp_path, capsys, monkeypatch
):
    checkpoint = tmp_path / "step-3"
    trained = ["model=a/model", "task_options.tags=true", "policy.max_pixels=5000"]
    load_settings("counting", trained).save(checkpoint / "config.yaml")
    calls = []
    monkeypatch.setattr(
        "vlm_grpo.eval.benchmark.evaluate_benchmark", lambda *given: calls.append(given)
    )
    given = [*ROWS, "--checkpoint", checkpoint, "policy.dtype=float32"]
    run(capsys, "evaluate", "tallyqa", *given)
    (_, settings, folder, *_) = calls[0]
    assert folder == checkpoint
    assert (settings.model, settings.task_options) == ("a/model", {"tags": True, "thinking": False})
    assert (settings.policy.max_pixels, settings.policy.dtype) == (5000, "float32")
    assert (settings.name, settings.data.eval) == ("benchmark-tallyqa", "embedded:counting")


SERVER = ["--server", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SERVER, "--checkpoint", "runs"], "leave out --checkpoint and --predictions"),
        ([*SERVER, "--predictions", "p.jsonl"], "leave out --checkpoint and --predictions"),
        (["--server", "localhost:8000"], "'localhost:8000' must start with http://"),
        ([*SERVER, "--price", "2.5"], "--price 2.5: write IN,OUT, such as 2.5,10"),
        ([*SERVER, "--frame", "permil"], "did you mean permille"),
        ([*SERVER, "--frame", "permille", "model=embedded"], "the frame of embedded is known"),
        ([*SERVER, "--format", "r1_v"], "--format needs --predictions"),
        ([*SERVER, "--api-key-env", "NO_KEY"], "NO_KEY holds no API key"),
        ([*SERVER, "model=nothing/such/here"], "there is no such folder"),
        (["--served-model", "a"], "--served-model needs --server"),
        (["--api-key-env", "A"], "--api-key-env needs --server"),
        (["--price", "1,2"], "--price needs --server"),
        (["--concurrency", "3", "--predictions", "p.jsonl"], "--concurrency needs --server"),
    ],
)
@pytest.mark.parametrize("given", [["tallyqa", *ROWS], ["counting"]], ids=["benchmark", "recipe"])
def test_options_of_a_server_that_cannot_be_used_are_one_message(
    capsys, tmp_path, monkeypatch, given, arguments, message
):
    monkeypatch.chdir(tmp_path)
    if "model=embedded" not in arguments and given == ["counting"]:
        arguments = ["model=none", *arguments]
    assert message in fails(capsys, "evaluate", *given, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_behind_an_address_needs_no_model(capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "vlm_grpo.eval.benchmark.evaluate_benchmark", lambda *given: calls.append(given)
    )
    options = ["--served-model", "gpt", "--concurrency", "4", "--price", "2.5,10"]
    options += ["--timeout", "9"]
    for model in ([], ["model=embedded"]):
        run(capsys, "evaluate", "tallyqa", *ROWS, *SERVER, *options, *model)
    assert [settings.model for _, settings, *_ in calls] == ["none", "embedded"]
    endpoint = Endpoint("http://127.0.0.1:1", "gpt", concurrency=4, price=(2.5, 10.0), timeout=9.0)
    assert [given[2:] for given in calls] == [(None, None, endpoint)] * 2


def test_a_recipe_behind_an_address_is_evaluated_and_its_failures_are_one_message(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(http_json, "FIRST_WAIT", 0.0)
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "counting", "model=none", "data.eval_limit=9", "--server"]
    model = ChatModel(lambda text, image: "3")
    with serve(model) as server:
        model.fail = lambda text, earlier: Reply(status=500) if "circles" in text else None
        message = fails(capsys, *command, server.address)
        assert "error: the server gave no output for" in message
        assert message.endswith("all other outputs are saved: the same command asks for these\n")
        model.fail = lambda text, earlier: None
        status, out, err = run(capsys, *command, server.address)
    assert status == 0
    assert "(n = 9)" in out
    assert "predictions in runs/counting/evaluation/served-policy.jsonl" in out
    assert "resuming after" in err


def test_help_names_every_format_and_frame(capsys):
    _, out, _ = run(capsys, "evaluate", "--help")
    words = {*out.replace(",", " ").replace(".", " ").split()}
    assert {"predictions", *LAYOUTS, *FRAMES} <= words


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

    given = ["counting", "--data", counting_data, "--predictions", predictions]
    status, out, _ = run(capsys, "evaluate", *given, "--json")
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
        ("<answer>3</answer>", [], 2),  # as on benchmarks: tags are read if present
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


def test_the_table_shows_means(capsys, counting_data, tmp_path):
    rows = [{"id": f"r{n}", "output": "3"} for n in (3, 5)]
    given = ["--data", counting_data, "--predictions", write_jsonl(tmp_path / "out.jsonl", *rows)]
    _, out, _ = run(capsys, "evaluate", "counting", *given, "--no-tags")
    assert all(text in out for text in ("exact", "all 2", "0.500"))


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


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--frame", "permil"], "did you mean permille?"), ([], "none.jsonl cannot be read")],
)
def test_what_is_not_there_is_named(capsys, counting_data, option, message):
    given = ["counting", "--data", counting_data, "--predictions", "none.jsonl", *option]
    assert message in fails(capsys, "evaluate", *given)
