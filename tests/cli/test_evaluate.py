"""``vlm-grpo evaluate``: options, settings of a checkpoint, scores of files of outputs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import fails, run, write_jsonl

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.eval import benchmark, evaluate, remote
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task.coordinates import FRAMES

ROWS = ["--data", "embedded:counting"]
SERVER = ["--server", "http://127.0.0.1:1"]


@pytest.fixture
def benchmark_calls(monkeypatch):
    """The arguments of the evaluations on benchmarks, which are not made."""
    calls = []
    monkeypatch.setattr(benchmark, "evaluate_benchmark", lambda *given: calls.append(given))
    return calls


def test_a_run_is_evaluated_under_the_names_of_the_other_commands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    scored = SimpleNamespace(lines=[], metrics={}, path="")
    monkeypatch.setattr(remote, "describe_differences", lambda local, served: "")
    monkeypatch.setattr(evaluate, "evaluate", lambda *given: calls.append(given) or scored)
    newest = Path("runs/mine/checkpoints/step-10")
    load_settings("counting", ["seed=7"]).save(Path("runs/mine/config.yaml"))
    for folder in (newest, newest.with_name("step-2")):
        load_settings("counting", ["seed=7"]).save(folder / "config.yaml")
        (folder / "config.json").write_text("{}")
    for name in ("mine", "runs/mine", "mine@10", str(newest)):
        run(capsys, "evaluate", name, "data.eval_limit=9")
    found = [(settings.seed, settings.data.eval_limit, folder) for settings, folder, _ in calls]
    assert found == [(7, 9, newest)] * 4
    calls.clear()
    run(capsys, "evaluate", "mine", "--checkpoint", "mine@2")
    run(capsys, "evaluate", "mine", *SERVER)
    run(capsys, "evaluate", "mine", *SERVER, "--compare", "model=embedded")
    # Of --compare, the server is asked first; then the weights here, which are the run's.
    assert [folder for _, folder, _ in calls] == [newest.with_name("step-2"), None, None, newest]


def test_the_help_names_every_frame_and_a_benchmark_without_rows_what_to_give(capsys, succeed):
    assert {*FRAMES} <= {*re.findall(r"\w+", succeed("evaluate", "--help"))}
    message = fails(capsys, "evaluate", "refcoco", "model=embedded")
    assert "refcoco is a benchmark" in message
    assert "python -m vlm_grpo.data_scripts.refcoco --out refcoco.jsonl" in message
    assert "vlm-grpo evaluate refcoco --data refcoco.jsonl model=" in message


def test_a_benchmark_takes_the_settings_of_the_checkpoint(tmp_path, capsys, benchmark_calls):
    checkpoint = tmp_path / "step-3"
    trained = ["model=a/model", "task_options.tags=true", "policy.max_pixels=5000"]
    load_settings("counting", trained).save(checkpoint / "config.yaml")
    given = [*ROWS, "--checkpoint", checkpoint, "policy.dtype=float32"]
    run(capsys, "evaluate", "tallyqa", *given)
    (_, settings, folder, *_) = benchmark_calls[0]
    assert folder == checkpoint
    assert (settings.model, settings.task_options) == ("a/model", {"tags": True, "thinking": False})
    assert (settings.policy.max_pixels, settings.policy.dtype) == (5000, "float32")
    assert (settings.name, settings.data.eval) == ("benchmark-tallyqa", "embedded:counting")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SERVER, "--checkpoint", "runs"], "leave out --checkpoint and --predictions"),
        ([*SERVER, "--predictions", "p.jsonl"], "leave out --checkpoint and --predictions"),
        (["--server", "localhost:8000"], "'localhost:8000' must start with http://"),
        ([*SERVER, "--frame", "permil"], "did you mean permille"),
        ([*SERVER, "--frame", "permille", "model=embedded"], "the frame of embedded is known"),
        ([*SERVER, "model=nothing/such/here"], "there is no such folder"),
        (["--served-model", "a"], "--served-model needs --server"),
        (["--compare"], "--compare needs --server"),
        ([*SERVER, "--compare", "model=none"], "--compare needs model=…"),
        ([*SERVER, "--compare", "model=embedded", "evaluation.temperature=1"], "=0: a server"),
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


def test_a_benchmark_behind_an_address_needs_no_model(capsys, benchmark_calls):
    options = ["--served-model", "gpt", "--concurrency", "4", "--timeout", "9"]
    for model in ([], ["model=embedded"]):
        run(capsys, "evaluate", "tallyqa", *ROWS, *SERVER, *options, *model)
    assert [settings.model for _, settings, *_ in benchmark_calls] == ["none", "embedded"]
    endpoint = Endpoint("http://127.0.0.1:1", "gpt", concurrency=4, timeout=9.0)
    assert [given[2:] for given in benchmark_calls] == [(None, endpoint)] * 2


@pytest.fixture
def score(succeed, tmp_path):
    """A function that scores outputs of two counting rows; it returns what is printed."""
    rows = [{"id": f"r{n}", "question": "How many?", "answer": n} for n in (3, 5)]
    data = write_jsonl(tmp_path / "data.jsonl", *rows)

    def score(first: str, second: str, *flags: str, name: str = "counting") -> str:
        rows = [{"id": "r5", "output": second}, {"id": "r3", "output": first}]
        out = write_jsonl(tmp_path / "out.jsonl", *rows)
        return succeed("evaluate", name, "--data", data, "--predictions", out, *flags)

    return score


def test_json_has_one_row_per_example_and_the_total(score):
    out = score("<answer>three</answer>", "<answer>4</answer>", "--json")
    first, second, last = map(json.loads, out.splitlines())
    assert (first["id"], first["answer"], first["rewards"]["exact"]) == ("r3", 3, 1.0)
    assert (second["id"], second["metrics"]["absolute_error"]) == ("r5", 1.0)
    assert set(first) == {"id", "answer", "reward", "rewards", "metrics"}
    metrics = last["total"]["metrics"]
    assert (last["total"]["n"], metrics["exact"], metrics["absolute_error"]) == (2, 0.5, 0.5)


@pytest.mark.parametrize(
    ("output", "flags", "answered"),
    [
        ("3", [], 2),
        ("<answer>3</answer>", [], 2),  # as on benchmarks: tags are read if present
        ("<think>4</think><answer>3</answer>", [], 2),
        ("3", ["tags=true"], 0),
        ("<answer>3</answer>", ["tags=true"], 2),
        ("<answer>3</answer>", ["tags=false"], 0),
    ],
)
def test_an_answer_is_read_with_and_without_tags(score, output, flags, answered):
    total = json.loads(score(output, output, *flags, "--json").splitlines()[-1])["total"]
    assert total["metrics"]["answered"] == answered / 2
    assert total["metrics"]["exact"] == answered / 4  # 3 is right for one of two rows


def test_means_and_outputs_that_cannot_be_read_are_printed(score):
    assert "exact 50.0% [0.0%, 100.0%] (n = 2)" in score("3", "3", "tags=false")
    unread = "I see three or so", "3 or 4"
    for name in ("counting", "tallyqa"):
        out = score(*unread, name=name)
        assert "most outputs hold no answer that can be read, for example 'I see three" in out
    assert "models were asked for: a number alone" in out
