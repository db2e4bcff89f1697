"""Predictions on disk: the log of a stopped evaluation, and files that do not match."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.eval.generate import PredictionLog, build_request
from vlm_grpo.eval.outputs import read_predictions
from vlm_grpo.task.registry import load_task
from vlm_grpo.utils.chat import Turn

EXAMPLES = make_shapes.draw_examples("counting", 10, seed=1)
REQUEST = {"model": "embedded", "seed": 0}


KEYS = [(example.id, 0) for example in EXAMPLES]


def write_answers(examples):
    """Return one output per example: its gold answer."""
    return [str(example.answer) for example in examples]


def test_a_stopped_evaluation_keeps_its_complete_lines(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    log.append(KEYS[:4], EXAMPLES[:4], write_answers(EXAMPLES[:4]))
    log.append(KEYS[4:6], EXAMPLES[4:6], write_answers(EXAMPLES[4:6]))
    with log.rank_path.open("a") as file:  # the process ended within a line
        file.write('{"id": "shapes-coun')
    assert not log.path.exists(), "the file exists only when complete"

    resumed = PredictionLog(tmp_path, REQUEST)
    assert [*resumed.outputs] == KEYS[:6]
    resumed.append(KEYS[4:], EXAMPLES[4:], write_answers(EXAMPLES[4:]))
    resumed.finish(KEYS, EXAMPLES, write_answers(EXAMPLES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl", "request.json"]
    assert [*PredictionLog(tmp_path, REQUEST).outputs] == KEYS
    found, texts = read_predictions(resumed.path, EXAMPLES)
    assert texts == write_answers(EXAMPLES)
    assert found == EXAMPLES


def test_the_samples_of_an_example_are_told_apart(tmp_path):
    log, pair = PredictionLog(tmp_path, REQUEST), [EXAMPLES[0]] * 2
    keys = [(EXAMPLES[0].id, number) for number in range(3)]
    log.append(keys[1:], pair, ["b", "c"])
    assert PredictionLog(tmp_path, REQUEST).outputs == {keys[1]: "b", keys[2]: "c"}
    log.append(keys[:1], pair[:1], ["a"])
    log.finish(keys, [*pair, EXAMPLES[0]], ["a", "b", "c"])
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row.get("sample"), row["output"]) for row in rows] == [(None, "a"), (1, "b"), (2, "c")]


def test_a_lone_surrogate_can_be_logged(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    log.append(KEYS[:1], EXAMPLES[:1], ["\ud83d"])  # UTF-8 cannot encode it
    log.finish(KEYS[:1], EXAMPLES[:1], ["\ud83d"])
    assert PredictionLog(tmp_path, REQUEST).outputs == {KEYS[0]: "\ud83d"}


def test_a_log_of_another_request_is_refused(tmp_path):
    PredictionLog(tmp_path, REQUEST)
    with pytest.raises(UserError, match="seed was 0 and is now 1"):
        PredictionLog(tmp_path, REQUEST | {"seed": 1})


def test_a_request_has_the_prompts_in_full():
    settings, task = load_settings("counting"), load_task("counting")
    chat = replace(EXAMPLES[0], history=(Turn("user", "a"), Turn("assistant", "b")))
    with_system = settings.model_copy(update={"prompt": PromptSettings(system="Be brief.")})
    requests = [
        build_request(settings, None, task, EXAMPLES[:1]),
        build_request(settings, None, task, [chat]),
        build_request(with_system, None, task, EXAMPLES[:1]),
    ]
    assert len({json.dumps(request, sort_keys=True) for request in requests}) == 3


def test_each_process_writes_its_file_and_reads_all(tmp_path):
    first, second = PredictionLog(tmp_path, REQUEST), PredictionLog(tmp_path, REQUEST, rank=1)
    first.append(KEYS[:5], EXAMPLES[:5], write_answers(EXAMPLES[:5]))
    second.append(KEYS[5:], EXAMPLES[5:], write_answers(EXAMPLES[5:]))
    assert first.rank_path != second.rank_path
    third = PredictionLog(tmp_path, REQUEST)
    assert third.outputs == {(example.id, 0): str(example.answer) for example in EXAMPLES}


def test_resized_sizes_are_logged(tmp_path):
    image = replace(EXAMPLES[0].images[0], resized_size=(56, 56))
    example = replace(EXAMPLES[0], images=(image,))
    log = PredictionLog(tmp_path, REQUEST)
    log.finish(KEYS[:1], [example], ["3"])
    found, _ = read_predictions(log.path, EXAMPLES[:1])
    assert found[0].images[0].resized_size == (56, 56)


def test_a_last_line_without_a_newline_is_read(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [json.dumps({"id": e.id, "output": str(e.answer)}) for e in EXAMPLES]
    path.write_text("\n".join(lines))
    assert read_predictions(path, EXAMPLES)[1] == write_answers(EXAMPLES)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": EXAMPLES[0].id, "output": "3"}], f"no prediction for id '{EXAMPLES[1].id}'"),
        ([{"name": "x"}], ":1: a prediction is"),
        ([{"id": "other", "output": "3"}], "no example has the id 'other'"),
        ([{"id": EXAMPLES[0].id, "output": "3"}] * 2, "has a prediction already"),
        ([{"id": EXAMPLES[0].id, "output": 3}], ":1: a prediction is"),
        (["a text"], "p.jsonl:1: "),
        ([], f"no prediction for id '{EXAMPLES[0].id}'"),
    ],
)
def test_predictions_that_do_not_match_are_named(tmp_path, lines, message):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        read_predictions(path, EXAMPLES)


def test_missing_resized_sizes_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": EXAMPLES[0].id, "output": "3"}))
    read_predictions(path, EXAMPLES[:1])
    with pytest.raises(UserError, match='needs "seen"'):
        read_predictions(path, EXAMPLES[:1], needs_resized_size=True)
