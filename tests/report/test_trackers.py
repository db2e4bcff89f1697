"""Trackers receive metrics and images, and one that fails is dropped without ending the run."""

import io
import json
import logging
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY, Mock

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image
from report_runs import load_few_examples, make_group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlm_grpo import Example, UserError, load_task
from vlm_grpo.report.samples import build_completion_rows
from vlm_grpo.report.trackers import Trackers, check_installed


def start_trackers(names: list[str], run_dir: Path, resume_at: int = 0) -> Trackers:
    PartialState()  # Accelerate's trackers need it to log
    trackers = Trackers(names, run_dir)
    trackers.start({"optim.lr": "0.1"}, resume_at)
    return trackers


def test_tensorboard_gets_finite_metrics_and_images_and_hides_steps_that_are_run_again(tmp_path):
    trackers = start_trackers(["tensorboard"], tmp_path)
    trackers.log(1, {"reward": 0.5, "kl": math.nan})
    trackers.log_images(1, {"samples/0": Image.new("RGB", (6, 4), (255, 0, 0))})
    trackers.log(2, {"reward": 0.75, "kl": 0.1})
    trackers.log(3, {"reward": 1.0})
    trackers.finish()
    # Files are read by name: time and a number per process, where 10 comes before 9.
    for path in tmp_path.glob("events*"):
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    again = start_trackers(["tensorboard"], tmp_path, resume_at=2)
    again.log(3, {"reward": 30.0})
    again.finish()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.75), (3, 30)]
    assert [e.step for e in events.Scalars("kl")] == [2]
    (shown,) = events.Images("samples/0")
    image = Image.open(io.BytesIO(shown.encoded_image_string))
    assert (image.size, image.getpixel((0, 0))) == ((6, 4), (255, 0, 0))


@pytest.mark.parametrize(
    "point", ["start", "store_init_configuration", "log", "log_images", "finish"]
)
def test_a_tracker_that_fails_is_reported_once_and_dropped(point, tmp_path, monkeypatch, caplog):
    service = Mock()
    service.name = "wandb"
    getattr(service, point).side_effect = ConnectionError("the service is down")
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", lambda **_: service)
    with caplog.at_level(logging.WARNING):
        trackers = start_trackers(["wandb", "tensorboard"], tmp_path)
        for step in (1, 2):
            trackers.log(step, {"reward": 0.5})
            trackers.log_images(step, {"samples/0": Image.new("RGB", (4, 4))})
        trackers.finish()
    assert caplog.text.count("tracker wandb failed and is dropped") == 1
    assert "ConnectionError: the service is down" in caplog.text
    assert service.method_calls[-1][0] == point  # it is not called afterwards
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("reward")) == len(events.Images("samples/0")) == 2


TEXTS = ["<answer>[1, 2, 30, 40]</answer>", "nothing"]


def log_completions(trackers: Trackers) -> Example:
    """Log a group of two completions after one step, and return its example."""
    task = load_task("grounding")
    (example,) = load_few_examples("grounding", task)
    rows = build_completion_rows(task, 0, [make_group(task, example, TEXTS)], [[0.5, -0.5]])
    trackers.log_table(1, "completions", rows)
    return example


def test_trackers_with_tables_get_the_completions_with_their_image(tmp_path, monkeypatch):
    service = Mock()
    service.name = "trackio"
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", lambda **_: service)
    library: Any = ModuleType("trackio")
    # The arguments that tables of Weights & Biases and trackio have in common.
    library.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]
    library.Image = lambda image: ("shown", image.size)
    monkeypatch.setitem(sys.modules, "trackio", library)
    trackers = start_trackers(["trackio", "tensorboard"], tmp_path)
    assert trackers.takes_tables
    example = log_completions(trackers)
    trackers.finish()
    service.log.assert_called_once_with(ANY, step=1)
    first, second = service.log.call_args.args[0]["completions"]
    assert (first["id"], first["gold"]) == (example.id, str(example.answer))
    assert first["completion"] == TEXTS[0]
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)
    assert second["truncated"]  # the helper's text has no closing tag
    assert {"prompt", "reward", "tokens", "step"} <= set(first)
    assert any(name.startswith("rewards/") for name in first)
    assert first["image"] == ("shown", (84, 84))  # the embedded scenes
    assert not start_trackers(["tensorboard"], tmp_path / "other").takes_tables


def test_wandb_writes_the_table_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")  # not among the development tools
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    trackers = start_trackers(["wandb"], tmp_path)
    log_completions(trackers)
    assert trackers.any  # it has not failed
    trackers.finish()
    (path,) = tmp_path.rglob("completions*.table.json")
    table = json.loads(path.read_text())
    assert [row[table["columns"].index("completion")] for row in table["data"]] == TEXTS
    files = [path.read_bytes() for path in (tmp_path / "data/artifacts/staging").iterdir()]
    images = [Image.open(io.BytesIO(data)) for data in files if data.startswith(b"\x89PNG")]
    assert [image.size for image in images] == [(84, 84)] * 2  # one per completion


def test_a_tracker_that_is_not_installed_is_refused_with_the_command():
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match="no_such_service is not installed: pip install"):
        check_installed(["tensorboard", "no_such_service"])
