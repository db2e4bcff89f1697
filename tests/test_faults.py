"""What goes wrong in the middle of a run, and what is left of the run then."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_disk import small_disk
from small_runs import TASK
from tiny_models import tiny_model

from vlm_grpo.checkpoint.store import list_checkpoints, verify_checkpoint
from vlm_grpo.config.run import Settings, load_settings
from vlm_grpo.data import load_examples
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.engine.logprobs import TokenScores
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.nonfinite import MAX_NONFINITE_STEPS
from vlm_grpo.grpo.prompts import MAX_REPLACEMENTS, PromptLoader
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.trainer import Trainer, train


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model, processor = tiny_model("qwen2_5_vl")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Settings of a run of 4 steps with 2 prompts each, on 8 rows with an image file each."""
    (tmp_path / "letters.py").write_text(TASK)
    rows = []
    for number in range(8):
        name = f"{number}.png"
        Image.new("RGB", (56, 28), (30 * number, 80, 120)).save(tmp_path / name)
        row = {"id": str(number), "images": [name], "question": "Which?", "answer": "abc"}
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def build(**changes: Any) -> Settings:
        values: dict[str, Any] = {
            "name": "run",
            "task": str(tmp_path / "letters.py"),
            "model": str(model_folder),
            "output_dir": str(tmp_path / "runs"),
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "policy": {"dtype": "float32"},
            "rollout": {"num_generations": 4, "max_completion_length": 6},
            "optim": {"lr": 1e-3, "prompts_per_step": 2, "max_steps": 4},
        }
        for name, value in changes.items():
            held = values.get(name)
            values[name] = {**held, **value} if isinstance(held, dict) else value
        return Settings.model_validate(values)

    return build


def trainer_for(settings: Settings) -> Trainer:
    task = load_task(settings.task)
    examples = load_examples(settings.data.train, task, settings.data, "train")
    held_out = []
    if settings.data.eval is not None:
        held_out = load_examples(settings.data.eval, task, settings.data, "eval")
    return Trainer(settings, load_policy(settings), task, examples, held_out)


def metrics_of(settings: Settings) -> list[dict[str, Any]]:
    lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    measured = ("time/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


def drawn(settings: Settings, index: int) -> Path:
    """The image file of the example that the run draws at this place of its stream."""
    task = load_task(settings.task)
    examples = load_examples(settings.data.train, task, settings.data, "train")
    path = ExampleStream(examples, settings.seed)[index].images[0].path
    assert path is not None
    return path


def cut_off(path: Path) -> bytes:
    """Leave a file that still says how large its image is, but not what is in it."""
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    return whole


# Images that go bad after the checks.


def test_an_unreadable_image_saves_and_ends_the_run_and_a_resume_continues(settings: Any) -> None:
    unbroken, run = settings(name="unbroken"), settings()
    train(unbroken)
    path = drawn(run, 4)  # the third step's first
    trainer = trainer_for(run)
    whole = cut_off(path)
    with pytest.raises(UserError, match=rf"image {path.name} cannot be read"):
        trainer.run()
    assert [m.steps for m, _ in list_checkpoints(run.run_dir / "checkpoints")] == [2]
    path.write_bytes(whole)
    train(run.model_copy(update={"resume": True}))
    assert metrics_of(run) == metrics_of(unbroken)


def test_an_unreadable_image_is_replaced_logged_and_counted_if_bad_rows_are_skipped(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = settings(data={"on_bad_row": "skip"})
    trainer = trainer_for(run)
    path = drawn(run, 4)
    cut_off(path)
    with caplog.at_level(logging.WARNING):
        trainer.run()
    assert [row["replaced_prompts"] for row in metrics_of(run)] == [0, 0, 1, 0]
    assert f"image {path.name} cannot be read" in caplog.text
    assert caplog.text.count("using the next example instead") == 1


def test_a_run_without_readable_images_ends_even_if_bad_rows_are_skipped(settings: Any) -> None:
    run = settings(data={"on_bad_row": "skip"})
    trainer = trainer_for(run)
    for index in range(8):
        path = drawn(run, index)
        if path.stat().st_size > 60:
            cut_off(path)
    with pytest.raises(UserError, match=r"image \d\.png cannot be read"):
        trainer.run()
    assert MAX_REPLACEMENTS >= 8  # all examples of this epoch were tried


def test_an_unreadable_held_out_image_saves_and_ends_the_run(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_grpo.model.policy.RECENT_IMAGES", 0)  # it would stand in for the file
    Image.new("RGB", (56, 28)).save(tmp_path / "held.png")
    row = {"id": "held", "images": ["held.png"], "question": "Which?", "answer": "abc"}
    (tmp_path / "held.jsonl").write_text(json.dumps(row))
    run = settings(data={"eval": str(tmp_path / "held.jsonl")}, evaluation={"every": 2})
    trainer = trainer_for(run)
    step = trainer.step

    def spoiling() -> dict[str, float]:
        if trainer.global_step == 1:
            cut_off(tmp_path / "held.png")
        return step()

    trainer.step = spoiling
    with pytest.raises(UserError, match=r"image held\.png cannot be read"):
        trainer.run()
    assert [m.steps for m, _ in list_checkpoints(run.run_dir / "checkpoints")] == [2]
    assert len(metrics_of(run)) == 2


def test_an_error_of_the_prefetching_thread_is_raised(settings: Any) -> None:
    run = settings()
    trainer = trainer_for(run)

    class Dying:
        def __getitem__(self, index: int) -> Any:
            raise ZeroDivisionError(f"at {index}")

    stream: Any = Dying()
    loader = PromptLoader(trainer.policy, trainer.task, stream, skip_unreadable=True)
    loader.prefetch([3])
    with pytest.raises(ZeroDivisionError, match="at 3"):
        loader.load([3])
    loader.close()


# Images that the model's resize refuses.


def test_thin_images_are_an_error_or_skipped(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("2.png", "5.png"):
        Image.new("RGB", (2010, 10)).save(tmp_path / name)  # 201 : 1, the resize takes 200 : 1
    with pytest.raises(UserError, match=r"2 examples have images(.|\n)*- 2: (.|\n)*- 5: "):
        trainer_for(settings())
    trainer = trainer_for(settings(data={"on_bad_row": "skip"}))
    assert len(trainer.sampler.stream.examples) == 6
    assert "skipped 2 examples whose images the model cannot use" in caplog.text
    for number in range(8):
        Image.new("RGB", (2010, 10)).save(tmp_path / f"{number}.png")
    with pytest.raises(UserError, match="8 examples have images that the model cannot use"):
        trainer_for(settings(data={"on_bad_row": "skip"}))


# Gradients.


def test_nonfinite_gradients_are_skipped_and_end_the_run_with_the_batch_saved(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(optim={"max_steps": 20})
    trainer = trainer_for(run)
    before = {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}
    score = trainer.policy.score

    def broken(batch: Any, with_entropy: bool = False) -> TokenScores:
        return TokenScores(score(batch, with_entropy).logprobs * torch.inf)

    monkeypatch.setattr(trainer.policy, "score", broken)
    with pytest.raises(UserError, match=r"5 consecutive steps.*optim\.lr") as ended:
        trainer.run()
    assert all(torch.equal(w, before[n]) for n, w in trainer.policy.trainable_parameters())

    path = run.run_dir / "overflow" / f"step-{MAX_NONFINITE_STEPS - 1:06d}-rank-0.jsonl"
    assert str(path) in str(ended.value)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8  # 2 prompts with 4 completions each
    names = {"id", "images", "prompt_token_ids", "token_ids", "logprobs", "rewards", "advantage"}
    assert all(names <= set(row) for row in rows)
    assert all(len(row["token_ids"]) == len(row["logprobs"]) > 0 for row in rows)
    # Advantages of a group add up to 0.
    assert sum(row["advantage"] for row in rows[:4]) == pytest.approx(0, abs=1e-5)


# Disks.

# TensorBoard writes in a thread of its own, which dies aloud where the disk is full.
LOUD = "ignore::pytest.PytestUnhandledThreadExceptionWarning"


def whole_rows(folder: Path) -> int:
    """How many rows the folder's JSON Lines hold; all of them must be whole."""
    return sum(
        isinstance(json.loads(line), dict)
        for path in folder.rglob("*.jsonl")
        for line in path.read_text().splitlines()
    )


@pytest.mark.filterwarnings(LOUD)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_at_a_checkpoint_leaves_earlier_ones_intact(
    settings: Any, tmp_path: Path, asynchronous: bool
) -> None:
    unbroken = settings(name="unbroken")
    checkpoint = train(unbroken).checkpoint
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    # Room for two checkpoints and a half, with as much as half of one for all else.
    with small_disk(tmp_path / "disk", 3 * size) as disk:
        run = settings(
            output_dir=str(disk.folder),
            checkpoint={"every": 1, "keep_last": 0, "asynchronous": asynchronous},
        )
        with pytest.raises(UserError, match=r"is full \(.*make room and continue with resume=true"):
            train(run)
        found = list_checkpoints(run.run_dir / "checkpoints")
        assert [m.steps for m, _ in found] == [1, 2]
        for _, path in found:
            verify_checkpoint(path)
        assert not [p for p in run.run_dir.rglob("*") if p.name.endswith(".tmp")]
        assert whole_rows(run.run_dir) > 0
        shutil.rmtree(found[0][1])  # make room for one, which is enough with keep_last=1
        again = {"checkpoint": run.checkpoint.model_copy(update={"keep_last": 1, "every": 4})}
        train(run.model_copy(update={"resume": True, **again}))
        assert metrics_of(run) == metrics_of(unbroken)


@pytest.mark.filterwarnings(LOUD)
@pytest.mark.parametrize("leaving", [0, 4096, 16384])
def test_a_disk_that_fills_up_between_steps_leaves_complete_files(
    settings: Any, tmp_path: Path, leaving: int
) -> None:
    with small_disk(tmp_path / "disk", 2**23) as disk:
        run = settings(
            output_dir=str(disk.folder),
            logging={"samples_every": 1},
            checkpoint={"every": 1, "keep_last": 1},
        )
        # Two steps, and a resume that finds the disk full: settings, metrics, samples and report
        # are each written again.
        first = run.model_copy(update={"optim": run.optim.model_copy(update={"max_steps": 2})})
        train(first)
        kept = {
            path: path.read_bytes()
            for path in run.run_dir.rglob("*")
            if path.is_file() and "tensorboard" not in path.parts
        }
        disk.fill(leaving)
        with pytest.raises(UserError, match="is full"):
            train(run.model_copy(update={"resume": True}))
        appended = {"metrics.jsonl", "alarms.jsonl", "config.yaml"}
        for path, content in kept.items():
            assert path.read_bytes() == content or path.name in appended, path
        assert not [p for p in run.run_dir.rglob("*") if p.name.endswith(".tmp")]
        assert whole_rows(run.run_dir) > 0
        assert load_settings(str(run.run_dir / "config.yaml")).name == "run"
        disk.make_room()
        train(run.model_copy(update={"resume": True}))
        assert len(metrics_of(run)) == 4


# Memory.


def held() -> tuple[int, int]:
    """Number and bytes of all tensors that are alive."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


def test_the_tensors_of_a_run_do_not_grow(settings: Any) -> None:
    """Tensors after 4 steps and after 16, by when every image has been seen twice over."""
    run = settings(optim={"max_steps": 20}, rollout={"max_completion_length": 6})
    trainer = trainer_for(run)
    trainer.run_dir.open(0)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            trainer.run_dir.write_metrics(trainer.global_step, trainer.step())
        trainer.sampler.loader.load(range(trainer.sampler.position, trainer.sampler.position + 2))
        return held()

    first, later = steps(4), steps(12)
    # Every prompt has as many tensors, of the same sizes, and none is prepared at this point.
    assert later == first
    trainer.run_dir.close()
    trainer.sampler.close()
