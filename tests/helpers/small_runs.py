"""Runs of a small random model that take a second, and readers of their files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_run
from vlm_grpo.errors import Stopped
from vlm_grpo.model.policy import load_policy
from vlm_grpo.training.stopping import StepInterrupted, StopRequest
from vlm_grpo.training.trainer import Trainer, train

SMALL = (
    *("data.train_limit=12", "data.eval=null", "evaluation.every=0", "logging.samples_every=0"),
    *("optim.prompts_per_step=3", "optim.warmup_steps=0", "rollout.num_generations=4"),
    "optim.lr=1e-3",  # large enough that every snapshot is a different policy
)
TASK = '''
from vlm_grpo.task import Task, metric, reward

class Letters(Task):
    """Write many different lowercase letters: a reward that a random model sometimes earns."""

    primary_metric = "letters"

    def parse(self, text, example):
        return text

    def write(self, answer, example):
        return answer

    @reward()
    def letters(self, answer, example):
        return len(set(answer) & set("abcdefghijklmnopqrstuvwxyz")) / 26
'''

LORA = {"dtype": "float32", "lora": {"r": 4, "alpha": 8}}


def save_tiny_model(
    folder: Path, family: str = "qwen2_5_vl", seed: int = 2, ends: range | None = None, **more: Any
) -> Path:
    """Save a small random model, with a seed with which every group of a run's first steps has a
    spread; ``ends`` are tokens that end its completions."""
    model, processor = tiny_model(family, seed=seed, **more)
    if ends is not None:
        model.generation_config.eos_token_id = list(ends)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def small_run(folder: Path, source: Path, **changes: Any) -> Settings:
    """Return settings of four steps of three prompts with the model in ``source``, and changes."""
    task = folder / "letters.py"
    draft = task.with_suffix(f".{os.getpid()}")  # several ranks may write it while others read it
    draft.write_text(TASK)
    draft.replace(task)
    values: dict[str, Any] = {
        "name": "run",
        "task": str(task),
        "model": str(source),
        "output_dir": str(folder / "runs"),
        "data": {"train": "embedded:ocr", "train_limit": 12},
        "policy": {"dtype": "float32"},
        "rollout": {"num_generations": 4, "max_completion_length": 6},
        "optim": {"lr": 1e-2, "prompts_per_step": 3, "max_steps": 4},
        "logging": {"samples_every": 1},
    }
    return Settings.model_validate(change_blocks(values, changes))


def change_blocks(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with other values in their blocks, and others in place of single ones."""
    blocks = {name: value for name, value in values.items() if isinstance(value, dict)}
    return values | {name: blocks[name] | x if name in blocks else x for name, x in changes.items()}


def make_trainer(settings: Settings) -> Trainer:
    task, examples, held_out = load_run(settings)
    return Trainer(settings, load_policy(settings), task, examples, held_out)


class StopAt(StopRequest):
    """A request to stop at the run's n-th check, made before steps and evaluations, or, with
    ``polls``, that many tokens later, while the next step is sampled."""

    def __init__(self, count: int, polls: int = 0) -> None:
        super().__init__()
        self.left, self.polls = count, polls

    @property
    def reason(self) -> str | None:
        self.left -= 1
        return "a test" if self.left <= 0 and self.polls <= 0 else None

    def check(self) -> None:
        if self.left <= 0:
            self.polls -= 1
            if self.polls <= 0:
                raise StepInterrupted


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` without times, speed and memory, which differ."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "speed/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


def read_samples(run_dir: Path) -> dict[str, bytes]:
    """Return the content of every file in ``samples`` and ``evaluation``."""
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for part in ("samples", "evaluation")
        for path in sorted((run_dir / part).rglob("*"))
        if path.is_file()
    }


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(next(checkpoint.glob("*model.safetensors")))


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = load_weights(a), load_weights(b)
    assert set(first) == set(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_same_run(a: Path, b: Path, last: str = "step-4") -> None:
    first, second = map(read_metrics, (a, b))
    for row in (*first, *second):  # a new process has no decoded images in memory
        row.pop("work/image_decodes", None)
    assert first == second
    assert read_samples(a) == read_samples(b)
    assert_same_weights(a / "checkpoints" / last, b / "checkpoints" / last)


def make_embedded_trainer(folder: Path, *overrides: str) -> Trainer:
    """Return a trainer of the embedded model on twelve counting examples."""
    settings = load_settings("quickstart", [f"output_dir={folder}", *SMALL, *overrides])
    torch.manual_seed(0)
    trainer = make_trainer(settings)
    trainer.policy.sharing_check = None  # it would add passes to the counts
    return trainer


def stop_run(run: Settings, *stop: int) -> str:
    """Train until ``StopAt(*stop)`` ends the run; return its message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlm_grpo.training.trainer.StopRequest", lambda *_: StopAt(*stop))
        with pytest.raises(Stopped) as stopped:
            train(run)
    return str(stopped.value)


def train_with_stops(run: Settings, *stops: tuple[int, ...]) -> list[str]:
    """Train to the end with a ``StopAt`` in each call but the last; return the checkpoints."""
    resumed, checkpoints = run.model_copy(update={"resume": True}), []
    for stop in stops:
        message = stop_run(resumed, *stop)
        checkpoints.append(message.partition("checkpoints/")[2].partition(";")[0])
    train(resumed)
    return checkpoints


def assert_resumes(
    whole: Settings, stopped: Settings, *stops: tuple[int, ...], last: str = "step-4"
) -> list[str]:
    """Train one run in one go and the other with stops, and compare all that they wrote."""
    train(whole)
    checkpoints = train_with_stops(stopped, *stops)
    assert_same_run(whole.run_dir, stopped.run_dir, last)
    return checkpoints
