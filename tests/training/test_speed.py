"""Tokens per second and MFU of a step, from its counted work and times."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import make_embedded_trainer

from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.step_time import count_step_flops
from vlm_grpo.training import speed


def test_a_step_has_tokens_per_second_but_no_mfu_on_a_cpu(tmp_path: Path) -> None:
    trainer = make_embedded_trainer(tmp_path)
    metrics = trainer.step()
    tokens = metrics["completions/mean_length"] * 3 * 4  # prompts and completions of SMALL
    rates = {name: value for name, value in metrics.items() if name.startswith("speed/")}
    assert rates == {
        "speed/rollout_tokens_per_second": pytest.approx(tokens / metrics["time/rollout"]),
        "speed/update_tokens_per_second": pytest.approx(
            metrics["work/update_tokens"] / metrics["time/update"]
        ),
    }
    trainer.sampler.close()


def test_a_gpu_of_the_table_has_the_mfu_of_step_and_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "find_peak_rate", lambda device, dtype: 1e12)
    trainer = make_embedded_trainer(tmp_path)
    rollout = trainer._rollout  # noqa: SLF001
    groups = []
    monkeypatch.setattr(trainer, "_rollout", lambda: groups.append(rollout()) or groups[-1])
    for step in range(2):  # each measures itself alone
        metrics = trainer.step()
        shape, _ = read_model_shape(trainer.policy.model.config, trainer.settings.policy)
        flops = count_step_flops(shape, groups[step].groups, ())
        update = metrics["speed/update_mfu"] * metrics["time/update"] * 1e12
        total = metrics["speed/mfu"] * metrics["time/step"] * 1e12
        assert update > 0
        assert total - update == pytest.approx(flops.total, rel=1e-6)
    trainer.sampler.close()


def test_a_step_begun_by_another_process_has_no_speed(tmp_path: Path) -> None:
    trainer = make_embedded_trainer(tmp_path)
    trainer.step()
    for phase in ("prompts", "rollout"):  # a restored step loads its prompts outside of them
        del trainer.stopwatch.seconds[phase]
    assert not trainer.meter._rates({}, trainer.stopwatch.seconds)  # noqa: SLF001
    trainer.sampler.close()


def test_a_supervised_step_has_the_speed_of_its_update_alone(tmp_path: Path) -> None:
    trainer = make_embedded_trainer(tmp_path, "warm_start.steps=1")
    speeds = {name for name in trainer.step() if name.startswith("speed/")}
    assert speeds == {"speed/update_tokens_per_second"}
    trainer.sampler.close()
