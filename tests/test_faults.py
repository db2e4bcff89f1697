"""Failures in the middle of a run leave it in a state from which it can be resumed."""

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash
import pytest
import torch
from commands import write_jsonl
from PIL import Image
from processes import small_disk
from small_runs import make_trainer, read_metrics, small_run

from vlm_grpo import Settings, UserError, load_settings, train
from vlm_grpo.data.loading import load_run
from vlm_grpo.data.prompt_order import ExampleStream
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.checkpoint.checksums import verify_checkpoint


def make_row(name: object) -> dict[str, Any]:
    return {"id": str(name), "images": [f"{name}.png"], "question": "Which?", "answer": "abc"}


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Build settings of a run of 4 steps with 2 prompts each, on 8 rows with an image file each."""
    for number in range(8):
        Image.new("RGB", (56, 28), (30 * number, 80, 120)).save(tmp_path / f"{number}.png")
    write_jsonl(tmp_path / "rows.jsonl", *map(make_row, range(8)))
    blocks: dict[str, Any] = {
        "data": {"train": str(tmp_path / "rows.jsonl"), "train_limit": None},
        "optim": {"lr": 1e-3, "prompts_per_step": 2},
        "logging": {"samples_every": 10},
    }

    def build(**changes: Any) -> Settings:
        merged = {name: {**block, **changes.pop(name, {})} for name, block in blocks.items()}
        return small_run(tmp_path, model_folder, **merged, **changes)

    return build


def find_image(settings: Settings, index: int) -> Path:
    """Return the image file of the example at this index of the run's stream."""
    examples = load_run(settings)[1]
    path: Any = ExampleStream(examples, settings.seed)[index].images[0].path
    return path


def truncate(path: Path) -> bytes:
    """Leave only the header of an image file, which has its size, and return the full content."""
    content = path.read_bytes()
    path.write_bytes(content[:60])
    return content


def test_an_unreadable_image_saves_and_ends_the_run_and_a_resume_continues(settings):
    uninterrupted, run = settings(name="uninterrupted"), settings()
    train(uninterrupted)
    path = find_image(run, 4)  # the first of the third step
    trainer = make_trainer(run)
    content = truncate(path)
    with pytest.raises(UserError, match=rf"image {path.name} cannot be read"):
        trainer.run()
    assert [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")] == [2]
    path.write_bytes(content)
    train(run.model_copy(update={"resume": True}))
    assert read_metrics(run.run_dir) == read_metrics(uninterrupted.run_dir)


def test_an_unreadable_image_is_replaced_logged_and_counted_if_bad_rows_are_skipped(
    settings, caplog
):
    run = settings(data={"on_bad_row": "skip"})
    trainer = make_trainer(run)
    truncate(path := find_image(run, 4))
    with caplog.at_level(logging.WARNING):
        trainer.run()
    assert [row["replaced_prompts"] for row in read_metrics(run.run_dir)] == [0, 0, 1, 0]
    assert f"image {path.name} cannot be read" in caplog.text
    assert caplog.text.count("using the next example instead") == 1


def test_an_unreadable_held_out_image_saves_and_ends_the_run(settings, tmp_path, monkeypatch):
    # Otherwise the image would come from the cache.
    monkeypatch.setattr("vlm_grpo.model.prompts.RECENT_IMAGES", 0)
    Image.new("RGB", (56, 28)).save(tmp_path / "held.png")
    held_out = write_jsonl(tmp_path / "held.jsonl", make_row("held"))
    run = settings(data={"eval": str(held_out)}, evaluation={"every": 2})
    trainer = make_trainer(run)
    step, content = trainer.step, list[bytes]()

    def truncate_and_step() -> dict[str, float]:
        if trainer.global_step == 1:
            content.append(truncate(tmp_path / "held.png"))
        return step()

    trainer.step = truncate_and_step
    with pytest.raises(UserError, match=r"image held\.png cannot be read"):
        trainer.run()
    assert [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")] == [2]
    (tmp_path / "held.png").write_bytes(content[0])
    train(run.model_copy(update={"resume": True}))  # makes the evaluation of the second step first
    assert ["eval/letters" in row for row in read_metrics(run.run_dir)] == [False, True] * 2


# TensorBoard's thread raises if the disk is full.
TENSORBOARD_WARNING = "ignore::pytest.PytestUnhandledThreadExceptionWarning"


def count_rows(folder: Path) -> int:
    """Return the number of rows in the folder's JSON Lines files, which must all be complete."""
    return sum(
        isinstance(json.loads(line), dict)
        for path in folder.rglob("*.jsonl")
        for line in path.read_text().splitlines()
    )


@pytest.mark.filterwarnings(TENSORBOARD_WARNING)
def test_a_disk_that_is_full_at_a_checkpoint_leaves_earlier_ones_intact(settings, tmp_path):
    uninterrupted = settings(name="uninterrupted")
    checkpoint = train(uninterrupted).checkpoint
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    # Room for two and a half checkpoints, and half a checkpoint for all other files.
    with small_disk(tmp_path / "disk", 3 * size) as disk:
        run = settings(output_dir=str(disk.folder), checkpoint={"every": 1, "keep_last": 0})
        with pytest.raises(UserError, match=r"is full \(.*make room and continue with resume=true"):
            train(run)
        found = list_checkpoints(run.run_dir / "checkpoints")
        assert [step for step, _ in found] == [1, 2]
        for _, path in found:
            verify_checkpoint(path)
        assert not [p for p in run.run_dir.rglob("*") if p.name.endswith(".tmp")]
        assert count_rows(run.run_dir) > 0
        shutil.rmtree(found[0][1])  # room for one checkpoint, which is enough with keep_last=1
        changes = {"checkpoint": run.checkpoint.model_copy(update={"keep_last": 1, "every": 4})}
        train(run.model_copy(update={"resume": True, **changes}))
        assert read_metrics(run.run_dir) == read_metrics(uninterrupted.run_dir)


@pytest.mark.filterwarnings(TENSORBOARD_WARNING)
@pytest.mark.parametrize("leaving", [0, 16384])
def test_a_disk_that_fills_up_between_steps_leaves_complete_files(
    settings, tmp_path, leaving, monkeypatch
):
    # It fills up after the start, at which there was room.
    monkeypatch.setattr("vlm_grpo.training.trainer.check_disk", lambda *_: None)
    with small_disk(tmp_path / "disk", 2**23) as disk:
        checkpoint, logging = {"every": 1, "keep_last": 1}, {"samples_every": 1}
        run = settings(output_dir=str(disk.folder), logging=logging, checkpoint=checkpoint)
        # After two steps, a resume that writes settings, metrics, samples and report again finds
        # the disk full.
        first = run.model_copy(update={"optim": run.optim.model_copy(update={"max_steps": 2})})
        train(first)
        kept = {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()}
        disk.fill(leaving)
        with pytest.raises(UserError, match="is full"):
            train(run.model_copy(update={"resume": True}))
        appended = {"metrics.jsonl", "distributions.jsonl", "alarms.jsonl", "config.yaml"}
        for path, content in kept.items():
            assert path.read_bytes() == content or path.name in appended, path
        assert not [p for p in run.run_dir.rglob("*") if p.name.endswith(".tmp")]
        assert count_rows(run.run_dir) > 0
        assert load_settings(str(run.run_dir / "config.yaml")).name == "run"
        disk.make_room()
        train(run.model_copy(update={"resume": True}))
        assert len(read_metrics(run.run_dir)) == 4


def test_the_tensors_of_a_run_do_not_grow(settings):
    """Compare 4 steps with 8, after which every image has been used twice."""
    run = settings(optim={"max_steps": 20}, rollout={"max_completion_length": 6})
    trainer = make_trainer(run)
    trainer.run_dir.open(0)

    def run_steps() -> tuple[int, int]:
        for _ in range(4):
            trainer.run_dir.write_metrics(trainer.global_step, trainer.step())
        position = trainer.sampler.cursor.position
        trainer.sampler.loader.load(range(position, position + 2))
        gc.collect()
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return len(tensors), sum(tensor.nbytes for tensor in tensors)

    first, later = run_steps(), run_steps()
    # All prompts have the same number and sizes of tensors, and none is being prefetched.
    assert later == first
    trainer.run_dir.close()
    trainer.sampler.close()


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
    said = crash.crash(tmp_path, count=2, seed=1)
    assert "2 kills of a run of 6 steps" in said
    assert "the same weights, metrics and samples" in said
