"""Predictions on disk: an evaluation that stops goes on, and another's outputs are not taken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.predictions import PredictionLog, read_predictions

EXAMPLES = make_shapes.examples("counting", 10, seed=1)
REQUEST = {"model": "embedded", "seed": 0}


def outputs(examples):
    return [str(example.answer) for example in examples]


def test_a_stopped_evaluation_goes_on_with_whole_chunks(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    assert log.missing(EXAMPLES, chunk=4) == [0, 4, 8]
    log.add(EXAMPLES[:4], outputs(EXAMPLES[:4]))
    log.add(EXAMPLES[4:6], outputs(EXAMPLES[4:6]))
    with log.path.open("a") as file:  # the machine stops within a line
        file.write('{"id": "shapes-coun')

    again = PredictionLog(tmp_path, REQUEST)
    assert again.missing(EXAMPLES, chunk=4) == [4, 8]
    for start in again.missing(EXAMPLES, chunk=4):
        chunk = EXAMPLES[start : start + 4]
        again.add(chunk, outputs(chunk))
    assert PredictionLog(tmp_path, REQUEST).missing(EXAMPLES, chunk=4) == []
    found, texts = read_predictions(again.path, EXAMPLES)
    assert texts == outputs(EXAMPLES)
    assert found == EXAMPLES


def test_another_request_is_refused(tmp_path):
    PredictionLog(tmp_path, REQUEST)
    with pytest.raises(UserError, match="made under other settings"):
        PredictionLog(tmp_path, REQUEST | {"seed": 1})


def test_processes_write_files_of_their_own_and_all_are_read(tmp_path):
    first, second = PredictionLog(tmp_path, REQUEST), PredictionLog(tmp_path, REQUEST, rank=1)
    first.add(EXAMPLES[:5], outputs(EXAMPLES[:5]))
    second.add(EXAMPLES[5:], outputs(EXAMPLES[5:]))
    assert first.path != second.path
    together = PredictionLog(tmp_path, REQUEST)
    assert together.missing(EXAMPLES, chunk=5) == []
    assert together.outputs == {example.id: str(example.answer) for example in EXAMPLES}


def test_sizes_that_the_model_saw_come_back(tmp_path):
    image = replace(EXAMPLES[0].images[0], seen=(56, 56))
    example = replace(EXAMPLES[0], images=(image,))
    log = PredictionLog(tmp_path, REQUEST)
    log.add([example], ["3"])
    found, _ = read_predictions(log.path, EXAMPLES[:1])
    assert found[0].images[0].seen == (56, 56)


def test_predictions_that_do_not_cover_the_examples_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": EXAMPLES[0].id, "output": "3"}) + "\n")
    with pytest.raises(UserError, match=f"no output for 9 examples:\n  - {EXAMPLES[1].id}"):
        read_predictions(path, EXAMPLES)
    path.write_text('{"name": "x"}\n')
    with pytest.raises(UserError, match="holds no predictions"):
        read_predictions(path, EXAMPLES)
