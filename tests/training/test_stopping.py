"""Stopping a run with real signals, at its time limit, and after skipped updates."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from processes import wait_for
from small_runs import make_trainer, small_run

from vlm_grpo.cli import main
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.stopping import MAX_NONFINITE_STEPS, StopRequest
from vlm_grpo.training.trainer import train


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored() -> Iterator[None]:
    """Handle hangups also where nohup has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_keeps_checkpoints(tmp_path, model_folder):
    # From the third step on, the reward takes ten minutes, too long to wait for.
    changes = {"optim": {"max_steps": 30}, "checkpoint": {"every": 1, "keep_last": 0}}
    slow = small_run(tmp_path, model_folder, **changes)
    task, reward = Path(slow.task), "        return len(set(answer)"
    wait = (
        "        if self.progress >= 2 / 30:\n"
        f"            open({str(tmp_path / 'reached')!r}, 'w').close()\n"
        "            time.sleep(600)\n"
    )
    task.write_text("import time\n" + task.read_text().replace(reward, wait + reward))
    recipe, output = tmp_path / "slow.yaml", tmp_path / "slow.log"
    slow.save(recipe)
    process = forked.start(output, main, ["train", str(recipe), "--trust-code"])
    for is_reached in (
        (tmp_path / "reached").exists,
        # Until the first signal has been handled.
        lambda: "repeat to stop at once" in output.read_text(),
    ):
        wait_for(is_reached)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 130
    assert "interrupted; finished checkpoints are kept (resume=true)" in output.read_text()
    kept = [path.name for _, path in list_checkpoints(slow.run_dir / "checkpoints")]
    assert kept == ["step-1", "step-2"]


def test_the_time_limit_includes_loading(tmp_path, model_folder, monkeypatch):
    limited = small_run(tmp_path, model_folder, checkpoint={"max_hours": 1.0})
    clock, later = "vlm_grpo.training.stopping.time.monotonic", time.monotonic() + 7200
    # Loading takes two hours, so the limit expires before the first step.
    set_seed = "vlm_grpo.training.trainer.set_seed"
    monkeypatch.setattr(set_seed, lambda _: monkeypatch.setattr(clock, lambda: later))
    message = r"stopped by the time limit \(checkpoint.max_hours\) after step 0 of 4"
    with pytest.raises(Stopped, match=message) as stopped:
        train(limited)
    assert stopped.value.status == 75


def test_a_stop_request_stores_the_first_signal_raises_on_the_second_and_ignores_what_is_ignored():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reason, stop.status) == ("SIGTERM", 143)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason is None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_closed_terminal_sends_several_hangups_and_stops_the_run_once(monkeypatch):
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.reason, stop.status) == ("SIGHUP", 129)


def test_a_signal_names_the_work_that_it_waits_for(capsys):
    def stop(*earlier: float, inside: bool) -> str:
        with StopRequest() as request:
            for seconds in earlier:
                with request.finishing("update"):
                    time.sleep(seconds)
            with request.finishing("update") if inside else nullcontext():
                os.kill(os.getpid(), signal.SIGTERM)
        return capsys.readouterr().err

    sampled = "saving the last finished step; what was sampled since is sampled again"
    assert stop(inside=False) == f"\nSIGTERM: {sampled}; repeat to stop at once\n"
    assert "SIGTERM: finishing the update, the first, and saving" in stop(inside=True)
    assert "SIGTERM: finishing the update, about 1 s, and saving" in stop(0.7, inside=True)


def test_only_consecutive_steps_end_the_run_and_a_series_is_reported_once(settings, monkeypatch):
    trainer, found = make_trainer(settings(optim={"max_steps": 1})), []
    one_less = [True] * (MAX_NONFINITE_STEPS - 1)
    update, flags = trainer.updater.update, iter([*one_less, False, *one_less, True])
    changed = lambda batch: {**update(batch), "skipped_updates": next(flags)}  # noqa: E731
    monkeypatch.setattr(trainer.updater, "update", changed)
    warn = "vlm_grpo.training.stopping.logger.warning"
    monkeypatch.setattr(warn, lambda _, step: found.append(step))
    for _ in range(2 * MAX_NONFINITE_STEPS - 1):
        trainer.step()
    assert found == [0, MAX_NONFINITE_STEPS]
    with pytest.raises(UserError, match=r"in 5 consecutive steps.*step 9, are in .*samples"):
        trainer.step()


def test_a_run_skips_updates_that_are_not_finite_and_keeps_the_completions_that_ended_it(
    settings, monkeypatch
):
    run = settings(optim={"max_steps": 20}, logging={"samples_every": 0})
    trainer = make_trainer(run)
    before = {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}
    score = trainer.policy.score

    def score_infinite(*args: Any) -> TokenScores:
        return TokenScores(score(*args).logprobs * torch.inf)

    monkeypatch.setattr(trainer.policy, "score", score_infinite)
    with pytest.raises(UserError, match=r"5 consecutive steps.*optim\.lr"):
        trainer.run()
    assert all(torch.equal(w, before[n]) for n, w in trainer.policy.trainable_parameters())
    assert len(list((run.run_dir / "samples").glob("*.jsonl"))) == MAX_NONFINITE_STEPS
