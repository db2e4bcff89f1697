"""The room that a run's checkpoints need on its disk."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import LORA, make_trainer

from vlm_grpo.errors import UserError
from vlm_grpo.training.checkpoint.disk_space import check_disk, estimate_bytes


@pytest.mark.parametrize("policy", [{}, LORA])
def test_a_disk_without_room_for_a_checkpoint_ends_a_run_before_it_begins(
    settings, policy, monkeypatch, caplog
):
    reference = {"beta": 0.1, "reference_refresh_every": 2}
    step: Any = {"optim": {"max_steps": 1}, "rollout": {"max_completion_length": 2}}
    run = settings(policy=policy, objective=reference, **step)
    trainer, free = make_trainer(run), [1]
    usage = "vlm_grpo.training.checkpoint.disk_space.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=free[0]))
    with pytest.raises(UserError, match=r"takes about .* GB, and the disk of .* make room, or set"):
        trainer.run()
    assert not run.run_dir.exists()
    estimate = estimate_bytes(run, trainer.updater)
    for number, is_warned in ((3, False), (2, True)):  # keep_last=2, and the one being written
        free[0] = number * estimate
        check_disk(run, trainer.updater)
        assert ("less than the 3 that checkpoint.keep_last=2 needs" in caplog.text) == is_warned
    best = run.checkpoint.model_copy(update={"keep_best": True})
    check_disk(run.model_copy(update={"checkpoint": best}), trainer.updater)
    assert "less than the 4 that" in caplog.text
    folder = trainer.run().checkpoint
    caplog.clear()
    check_disk(run, trainer.updater)  # one of the three is there
    assert not caplog.records
    files = [file for file in folder.glob("*.safetensors") if file.stem != "examples"]
    assert len(files) == 3  # weights, optimizer and reference, whose headers are not counted
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert estimate == sum(file.stat().st_size for file in files) - headers
