"""Predictions on disk: an evaluation that stops goes on, and another's outputs are not taken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation.predictions import PredictionLog, read_predictions

EXAMPLES = make_shapes.draw_examples("counting", 10, seed=1)
REQUEST = {"model": "embedded", "seed": 0}


def outputs(examples):
    return [str(example.answer) for example in examples]


def test_a_stopped_evaluation_keeps_its_whole_lines(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    assert log.lacks(EXAMPLES[:4])
    log.add(EXAMPLES[:4], outputs(EXAMPLES[:4]))
    log.add(EXAMPLES[4:6], outputs(EXAMPLES[4:6]))
    with log.part.open("a") as file:  # the machine stops within a line
        file.write('{"id": "shapes-coun')
    assert not log.path.exists(), "a file that looks whole is whole"

    again = PredictionLog(tmp_path, REQUEST)
    assert not again.lacks(EXAMPLES[:6])
    assert again.lacks(EXAMPLES[4:8])
    again.add(EXAMPLES[4:], outputs(EXAMPLES[4:]))
    again.finish(EXAMPLES, outputs(EXAMPLES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl", "request.json"]
    assert not PredictionLog(tmp_path, REQUEST).lacks(EXAMPLES)
    found, texts = read_predictions(again.path, EXAMPLES)
    assert texts == outputs(EXAMPLES)
    assert found == EXAMPLES


def test_half_of_a_surrogate_pair_does_not_stop_it(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    log.add(EXAMPLES[:1], ["\ud83d"])  # UTF-8 cannot hold it
    log.finish(EXAMPLES[:1], ["\ud83d"])
    assert PredictionLog(tmp_path, REQUEST).outputs == {EXAMPLES[0].id: "\ud83d"}


def test_another_request_is_refused_and_told_apart(tmp_path):
    PredictionLog(tmp_path, REQUEST)
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        PredictionLog(tmp_path, REQUEST | {"seed": 1})


def test_processes_write_files_of_their_own_and_all_are_read(tmp_path):
    first, second = PredictionLog(tmp_path, REQUEST), PredictionLog(tmp_path, REQUEST, rank=1)
    first.add(EXAMPLES[:5], outputs(EXAMPLES[:5]))
    second.add(EXAMPLES[5:], outputs(EXAMPLES[5:]))
    assert first.part != second.part
    together = PredictionLog(tmp_path, REQUEST)
    assert together.outputs == {example.id: str(example.answer) for example in EXAMPLES}


def test_sizes_that_the_model_saw_come_back(tmp_path):
    image = replace(EXAMPLES[0].images[0], resized_size=(56, 56))
    example = replace(EXAMPLES[0], images=(image,))
    log = PredictionLog(tmp_path, REQUEST)
    log.finish([example], ["3"])
    found, _ = read_predictions(log.path, EXAMPLES[:1])
    assert found[0].images[0].resized_size == (56, 56)


def test_a_last_line_without_its_end_counts(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [json.dumps({"id": e.id, "output": str(e.answer)}) for e in EXAMPLES]
    path.write_text("\n".join(lines))
    assert read_predictions(path, EXAMPLES)[1] == outputs(EXAMPLES)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": EXAMPLES[0].id, "output": "3"}], f"no prediction for id '{EXAMPLES[1].id}'"),
        ([{"name": "x"}], ":1: a prediction is"),
        ([{"id": "other", "output": "3"}], "no example has the id 'other'"),
        ([{"id": EXAMPLES[0].id, "output": "3"}] * 2, "has a prediction already"),
        ([{"id": EXAMPLES[0].id, "output": 3}], ":1: a prediction is"),
    ],
)
def test_predictions_that_do_not_match_are_named(tmp_path, lines, message):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        read_predictions(path, EXAMPLES)


def test_sizes_that_a_frame_needs_are_missed(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": EXAMPLES[0].id, "output": "3"}))
    read_predictions(path, EXAMPLES[:1])
    with pytest.raises(UserError, match='needs "seen"'):
        read_predictions(path, EXAMPLES[:1], needs_resized_size=True)
