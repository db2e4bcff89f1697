"""Trackers receive metrics and images, and one that fails is dropped without ending the run."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.tracking.trackers import Trackers, check_installed
from vlm_grpo.trainer import train


def load_events(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def start_trackers(names: list[str], run_dir: Path, resume_at: int = 0) -> Trackers:
    trackers = Trackers(names, run_dir)
    trackers.start({"optim.lr": "0.1"}, resume_at)
    return trackers


def test_tensorboard_gets_finite_metrics_and_images(tmp_path: Path) -> None:
    trackers = start_trackers(["tensorboard"], tmp_path)
    trackers.log(1, {"reward": 0.5, "kl": math.nan})
    trackers.log_images(1, {"samples/0": Image.new("RGB", (6, 4), (255, 0, 0))})
    trackers.log(2, {"reward": 0.75, "kl": 0.1})
    trackers.finish()

    events = load_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [e.step for e in events.Scalars("kl")] == [2]
    (shown,) = events.Images("samples/0")
    image = Image.open(io.BytesIO(shown.encoded_image_string))
    assert (image.size, image.getpixel((0, 0))) == ((6, 4), (255, 0, 0))


def test_a_resumed_run_hides_the_steps_that_are_run_again(tmp_path: Path) -> None:
    first = start_trackers(["tensorboard"], tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward": float(step)})
    first.finish()
    again = start_trackers(["tensorboard"], tmp_path, resume_at=2)
    again.log(3, {"reward": 30.0})
    again.finish()

    assert [e.value for e in load_events(tmp_path).Scalars("reward")] == [1, 2, 30]


class Broken(GeneralTracker):
    """A service that fails at one point."""

    name = "wandb"
    requires_logging_directory = False
    fails_in = ""
    calls: ClassVar[list[str]] = []

    def __init__(self, run_name: str, **_: Any) -> None:
        super().__init__()
        self.calls.append("init")

    tracker = None

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails_in:
            raise ConnectionError("the service is down")

    def start(self) -> None:
        self._do("start")

    def store_init_configuration(self, values: dict) -> None:
        self._do("config")

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self._do("log")

    def log_images(self, values: dict, step: int | None = None, **_: Any) -> None:
        self._do("images")

    def finish(self) -> None:
        self._do("finish")


@pytest.mark.parametrize("point", ["start", "config", "log", "images", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_dropped(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Broken):
        fails_in = point

    Failing.calls = []
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Failing)
    with caplog.at_level(logging.WARNING):
        trackers = start_trackers(["wandb", "tensorboard"], tmp_path)
        for step in (1, 2):
            trackers.log(step, {"reward": 0.5})
            trackers.log_images(step, {"samples/0": Image.new("RGB", (4, 4))})
        trackers.finish()

    assert caplog.text.count("tracker wandb failed and is dropped") == 1
    assert "ConnectionError: the service is down" in caplog.text
    assert Failing.calls[-1] == point  # it is not called afterwards
    events = load_events(tmp_path)
    assert len(events.Scalars("reward")) == len(events.Images("samples/0")) == 2


def test_a_tracker_that_is_not_installed_is_refused_with_the_command() -> None:
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match="no_such_service is not installed: pip install"):
        check_installed(["tensorboard", "no_such_service"])


@pytest.mark.filterwarnings("default")  # mlflow's libraries warn
def test_mlflow_gets_metrics_settings_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")  # not among the development tools: it brings 60 others
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'store.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    short = ["optim.max_steps=2", "optim.prompts_per_step=2", "optim.warmup_steps=0"]
    short += ["data.eval_limit=8"]
    result = train(
        load_settings(
            "counting",
            [*short, "name=logged", "logging.trackers=[mlflow]", "logging.samples_every=1"],
        )
    )

    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("vlm-grpo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("logged", "FINISHED")
    assert run.data.params["rollout.num_generations"] == "8"
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(m.step, m.value) for m in history] == [
        (row["step"] + 1, row["reward"]) for row in logged
    ]
    images = [a.path for a in client.list_artifacts(run.info.run_id, "images")]
    (first,) = [p for p in images if re.match(r"images/samples~0\+step\+1\+.*\.png", p)]
    shown = Image.open(client.download_artifacts(run.info.run_id, first))
    assert shown.size == (84, 84)  # the embedded scenes, with the answers drawn on
