"""Tokens per second and MFU of a step, from its counted work and times."""

import gzip
import json

import pytest
import torch
from small_runs import make_embedded_trainer

from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.step_time import count_step_flops
from vlm_grpo.training.speed import profile_step
from vlm_grpo.utils.stopwatch import Stopwatch


def test_a_step_has_tokens_per_second_but_no_mfu_on_a_cpu(tmp_path):
    trainer = make_embedded_trainer(tmp_path)
    trainer.stopwatch.seconds["update"] = 1e9  # of the step before, which does not count
    metrics = trainer.step()
    assert metrics["time/update"] < 1e9
    tokens = metrics["completions/mean_length"] * 3 * 4  # prompts and completions of SMALL
    rates = {name: value for name, value in metrics.items() if name.startswith("speed/")}
    passed = {"rollout": tokens, "update": metrics["work/update_tokens"]}
    expected = {f"speed/{n}_tokens_per_second": v / metrics[f"time/{n}"] for n, v in passed.items()}
    assert rates == pytest.approx(expected)
    trainer.sampler.close()
    trainer = make_embedded_trainer(tmp_path, "warm_start.steps=1")
    speeds = {name for name in trainer.step() if name.startswith("speed/")}
    assert speeds == {"speed/update_tokens_per_second"}  # of a supervised step
    trainer.sampler.close()


def test_a_gpu_of_the_table_has_the_mfu_of_step_and_update(tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_grpo.training.speed.find_peak_rate", lambda device, dtype: 1e12)
    trainer = make_embedded_trainer(tmp_path)
    rollout = trainer._rollout  # noqa: SLF001
    groups = []
    monkeypatch.setattr(trainer, "_rollout", lambda: groups.append(rollout()) or groups[-1])
    for step in range(2):  # each measures itself alone
        metrics = trainer.step()
        shape = read_model_shape(trainer.policy.model.config, trainer.settings.policy)
        flops = count_step_flops(shape, groups[step].groups, ())
        update = metrics["speed/update_mfu"] * metrics["time/update"] * 1e12
        total = metrics["speed/mfu"] * metrics["time/step"] * 1e12
        assert update > 0
        assert total - update == pytest.approx(flops.total, rel=1e-6)
    trainer.sampler.close()


def test_only_the_chosen_step_has_a_trace_with_its_phases_and_one_that_fails_none(tmp_path, capsys):
    trainer = make_embedded_trainer(tmp_path, "logging.profile_steps=[1]", "optim.max_steps=2")
    for _ in range(2):
        trainer.step()
    trainer.sampler.close()
    (path,) = (trainer.settings.run_dir / "profile").iterdir()
    assert path.name == "step-1.json.gz"
    assert f"profile    {path}: open it at https://ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step", "rollout", "prefill", "decode", "reward", "update"} <= names
    assert "aten::index_select" in names
    stopwatch, folder = Stopwatch(), tmp_path / "failed"
    running = profile_step(folder / "step-0", stopwatch, torch.device("cpu"))
    with pytest.raises(ValueError, match="expected"), running:
        raise ValueError("expected")
    assert not list(folder.iterdir())
    assert stopwatch.annotate is Stopwatch().annotate
