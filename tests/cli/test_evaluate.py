"""``vlm-grpo evaluate``: its options, and the settings that a checkpoint brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_model import ChatModel, serve
from commands import fails, run
from judge_server import Reply

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.serve.chat import Endpoint
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
    run(
        capsys, "evaluate", "tallyqa", *ROWS, "--checkpoint", checkpoint, "policy.dtype=float32"
    )  # fmt: skip
    (_, settings, folder, *_) = calls[0]
    assert folder == checkpoint
    assert (settings.model, settings.task_options) == (
        "a/model",
        {"tags": True, "thinking": False},
    )
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
