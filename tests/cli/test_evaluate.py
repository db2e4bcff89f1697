"""``vlm-grpo evaluate``: its options, and the settings that a checkpoint brings."""

from __future__ import annotations

import pytest
from commands import fails, run

from vlm_grpo.config.recipes import load_settings

ROWS = ["--data", "embedded:counting"]


def test_a_missing_checkpoint_is_named(capsys, tmp_path):
    message = fails(capsys, "evaluate", "counting", "--checkpoint", tmp_path / "none")

    assert f"checkpoint {tmp_path / 'none'} is not a folder" in message


def test_a_run_in_the_place_of_a_checkpoint_is_refused_with_its_checkpoint(capsys, tmp_path):
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    message = fails(capsys, "evaluate", "counting", "--checkpoint", tmp_path)

    assert f"{tmp_path} is a run: give one of its checkpoints, {tmp_path}/checkpoints" in message


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
        "vlm_grpo.evaluation.evaluate.evaluate_benchmark", lambda *given: calls.append(given)
    )
    run(
        capsys, "evaluate", "tallyqa", *ROWS, "--checkpoint", checkpoint, "policy.dtype=float32"
    )  # fmt: skip
    (_, settings, folder, _) = calls[0]
    assert folder == checkpoint
    assert (settings.model, settings.task_options) == ("a/model", {"tags": True})
    assert (settings.policy.max_pixels, settings.policy.dtype) == (5000, "float32")
    assert (settings.name, settings.data.eval) == ("benchmark-tallyqa", "embedded:counting")
