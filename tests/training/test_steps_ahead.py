"""Rollouts by a sampler outside the policy, also ahead of the steps that use them."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks
from outside import CopySampler, make_run, train_on_ranks
from small_runs import make_trainer, read_metrics, train_with_stops

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training import rollout as rollout_module
from vlm_grpo.training import trainer as trainer_module
from vlm_grpo.training.checkpoint.files import read_metadata
from vlm_grpo.training.stopping import StepInterrupted
from vlm_grpo.training.trainer import train
from vlm_grpo.utils.jsonl import read_rows


def get_newest(run: Settings) -> Path:
    return list_checkpoints(run.run_dir / "checkpoints")[-1][1]


def read_ids(run: Settings) -> list[list[str]]:
    """Return the ids of the examples of each finished step."""
    files = sorted((run.run_dir / "samples").glob("step-*.jsonl"))
    return [[row["id"] for row in read_rows(file)] for file in files]


def assert_each_example_once(run: Settings) -> None:
    """Four steps of three prompts are one epoch of the twelve examples."""
    ids = read_ids(run)
    assert [len(step) for step in ids] == [3, 3, 3, 3]
    assert len({example for step in ids for example in step}) == 12


def test_an_outside_sampler_gives_the_run_of_the_policy(settings, vllm):
    """With equal kernels the weights of the correction are 1, up to rounding."""
    # Adam turns the rounding of gradients that are almost 0 into whole steps: these are small.
    optim = {"lr": 1e-3, "max_steps": 2}
    expected, run = make_trainer(settings(name="policy", optim=optim)), vllm(optim=optim)
    expected.run()
    train(run)
    rows = read_metrics(expected.settings.run_dir), read_metrics(run.run_dir)
    for ours, theirs in zip(*rows, strict=True):
        for name in ("reward", "completions/mean_length", "entropy", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
        assert theirs["sampling/effective_sample_size"] == pytest.approx(1, abs=1e-6)
        assert theirs["staleness/max"] == 0
        assert "staleness/max" not in ours


@pytest.mark.parametrize(
    ("ahead", "versions", "rests"), [(0, [0, 1, 2, 3], 4), (1, [0, 0, 1, 2], 1)]
)
def test_later_steps_are_sampled_with_the_weights_of_their_start(vllm, ahead, versions, rests):
    """Servers rest in updates in which they do not sample: the last step has no later one."""
    run = vllm(ahead)
    train(run)
    (outside,) = vllm.samplers
    assert [version for version, _ in outside.sampled] == versions
    assert outside.rests == rests
    rows = read_metrics(run.run_dir)
    for name in ("staleness/mean", "staleness/max"):
        assert [row[name] for row in rows] == [s - v for s, v in enumerate(versions)]
    for row in rows:  # only older weights have another distribution
        assert (row["sampling/sampling_logp_difference/mean"] > 1e-4) == (row["staleness/max"] > 0)
    assert_each_example_once(run)
    assert sorted(map(sorted, read_ids(run))) == sorted(sorted(ids) for _, ids in outside.sampled)


def test_generation_runs_while_the_policy_is_updated(vllm, monkeypatch):
    """The second rollout lasts until the first update, which awaits all that was begun."""
    updating, check = threading.Event(), trainer_module.check_gradients

    def check_later(*arguments: Any) -> Any:
        updating.set()
        vllm.samplers[-1].thread.submit(lambda: None).result()
        return check(*arguments)

    began = []
    vllm.before = lambda number: began.append(number != 1 or updating.wait(60))
    monkeypatch.setattr(trainer_module, "check_gradients", check_later)
    start = time.perf_counter()
    train(run := vllm(1, optim={"max_steps": 3}))
    end = time.perf_counter()
    assert began == [True] * 3
    spent = [row["time/generation"] for row in read_rows(run.run_dir / "metrics.jsonl")]
    assert min(spent) > 0
    assert sum(spent) < end - start  # of one after the other


@pytest.mark.parametrize(("ahead", "stop", "done"), [(1, (2,), 1), (2, (3, 1), 2)])
def test_a_stopped_run_uses_each_example_once(vllm, ahead, stop, done):
    """After a resume, completions that were generated ahead are generated again."""
    run = vllm(ahead)
    name = f"step-{done}"
    assert train_with_stops(run, stop) == [name]
    assert_each_example_once(run)
    metadata = read_metadata(run.run_dir / "checkpoints" / name)
    assert metadata["step"] == done
    assert len(metadata["unused"]) == 3 * min(ahead, 4 - done)
    staleness = [row["staleness/max"] for row in read_metrics(run.run_dir)]
    assert staleness[done] == 0
    versions = [version for version, _ in vllm.samplers[1].sampled]
    assert versions[: ahead + 1] == [done] * min(ahead + 1, 4 - done)


def test_replacements_are_sampled_with_the_current_weights(vllm, monkeypatch):
    """Each step replaces all of its groups once."""
    monkeypatch.setattr(rollout_module, "has_spread", lambda *_: False)
    run = vllm(1, rollout={"dynamic_sampling": True, "max_resample": 1})
    train(run)
    (outside,) = vllm.samplers
    # Each step starts the first round of the next one, then its own replacements.
    assert [version for version, _ in outside.sampled] == [0, 0, 0, 1, 1, 2, 2, 3]
    ids = [example for _, examples in outside.sampled for example in examples]
    assert all(ids.count(example) == 2 for example in ids)  # two epochs of 12


def test_an_unreadable_image_ahead_of_its_step_loses_nothing_also_without_steps_ahead_later(
    vllm, monkeypatch
):
    run = vllm(1)
    load = rollout_module.PromptLoader.load

    def fail(self: Any, indices: list[int], *noise: Any) -> Any:
        if 6 in indices:
            raise UserError("an image cannot be read")
        return load(self, indices, *noise)

    monkeypatch.setattr(rollout_module.PromptLoader, "load", fail)
    with pytest.raises(UserError, match="cannot be read"):
        train(run)
    monkeypatch.setattr(rollout_module.PromptLoader, "load", load)
    checkpoint = get_newest(run)
    assert read_metadata(checkpoint)["unused"] == [3, 4, 5]  # step 2's prompts, at step 1
    train(vllm(0, resume=True))  # the number of steps may change
    assert [version for version, _ in vllm.samplers[1].sampled] == [1, 2, 3]
    assert_each_example_once(run)


def test_a_signal_ends_the_wait_at_once(vllm, monkeypatch):
    """The first rollout of the second step never ends by itself."""
    released, ended = threading.Event(), []

    def hang(number: int) -> None:
        if number == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            ended.append(released.wait(60))

    monkeypatch.setattr(rollout_module, "POLL_SECONDS", 0.1)
    close = CopySampler.close
    monkeypatch.setattr(CopySampler, "close", lambda self: released.set() or close(self))
    run, vllm.before = vllm(), hang
    with pytest.raises(Stopped) as stopped:
        train(run)
    assert ended == [True]  # by close, which the wait has not outlasted
    assert stopped.value.status == 128 + signal.SIGINT
    assert get_newest(run).name == "step-1"
    vllm.before = lambda number: None
    train(run.model_copy(update={"resume": True}))
    assert_each_example_once(run)


def test_a_stop_of_another_rank_ends_the_step(vllm, monkeypatch):
    trainer = make_trainer(vllm(1))
    monkeypatch.setattr(trainer.sampler, "_add_ranks", lambda flags: [1, 0])
    with pytest.raises(StepInterrupted):
        trainer.sampler.sample(0)
    assert (trainer.sampler.cursor.position, trainer.sampler.unused) == (0, [])
    trainer.sampler.close()


@pytest.mark.slow
def test_two_ranks_stop_together_and_use_each_example_once(model_folder, tmp_path):
    """Rank 0 receives the signal while it waits; rank 1 has its completions and receives none."""
    for resume, name in ((False, "step-1"), (True, "step-4")):
        run_ranks(tmp_path / "log", 2, train_on_ranks, tmp_path, model_folder, resume)
        assert get_newest(make_run(tmp_path, model_folder, resume)).name == name
    run = make_run(tmp_path, model_folder, resume=True)
    first, last = (read_metadata(path) for _, path in list_checkpoints(run.run_dir / "checkpoints"))
    assert (first["position"], first["unused"]) == (6, [3, 4, 5])
    assert last["position"] == 12
    assert "unused" not in last
    ids = [example for step in read_ids(run) for example in step]  # of the first rank
    assert len(set(ids)) == len(ids)
    # The first two rollouts after the stop have the weights of then.
    assert [row["staleness/max"] for row in read_metrics(run.run_dir)] == [0, 0, 1, 1]


def test_weights_are_gathered_only_to_check_the_form(vllm, monkeypatch):
    """The update shares prompts, so the run checks that on the first completions it gets."""
    trainer, gathered = make_trainer(vllm()), []
    monkeypatch.setattr(trainer.strategy, "gathered", lambda: gathered.append(1) or nullcontext())
    check: Any = trainer.policy.sharing_check
    assert check.checked is None
    trainer.step()
    assert check.checked is not None
    assert check.has_seen_images
    assert len(gathered) == 1
    trainer.step()
    assert len(gathered) == 1
    trainer.sampler.close()
