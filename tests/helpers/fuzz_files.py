"""The files on which ``fuzz_cli.py`` runs commands: intact ones, odd ones, and mutants."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

RECIPE = """
task: counting
model: embedded
data: {train: "embedded:counting", eval: "embedded:counting", train_limit: 4, eval_limit: 2}
policy: {dtype: float32}
rollout: {num_generations: 2, max_completion_length: 2}
optim: {lr: 1.0e-4, warmup_steps: 1, prompts_per_step: 2, max_steps: 2}
checkpoint: {every: 1}
logging: {trackers: [], samples_every: 1}
"""
TASK = '''
from vlm_grpo.task import Task, reward


class Letters(Task):
    """Name a letter."""

    primary_metric = "right"

    def parse(self, text, example):
        PARSE
        return text[:1] or None

    def write(self, answer, example):
        return answer

    @reward()
    def right(self, answer, example):
        return float(answer == example.answer)
'''
RUNS = ("runs/one", "runs/lora")
"""Runs that a caller makes with ``tiny.yaml`` after ``write_files``."""
MUTANTS = 12
"""Number of mutants of each kind of file."""


def write_files(folder: Path) -> None:
    """Write everything that needs no model."""
    os.chdir(folder)
    Path("tiny.yaml").write_text(RECIPE)
    Path("images").mkdir()
    for number in range(3):
        Image.new("RGB", (64, 56 + number), "white").save(f"images/{number}.png")
    shutil.copy("images/0.png", "photo.png")
    rows = [
        {"id": f"r{n}", "image": f"images/{n}.png", "question": "How many?", "answer": n}
        for n in range(3)
    ]
    write_rows("rows.jsonl", rows)
    write_rows("text.jsonl", [{"id": c, "question": "Which?", "answer": c} for c in "abc"])
    write_rows("outputs.jsonl", [{"id": row["id"], "output": "1"} for row in rows])
    Path("letters.py").write_text(TASK.replace("PARSE", "pass"))
    _write_odd_files()


def _write_odd_files() -> None:
    Path("raises.py").write_text("raise RuntimeError('no')\n")
    Path("exits.py").write_text("import sys\nsys.exit(3)\n")
    Path("exits_later.py").write_text(TASK.replace("PARSE", "raise SystemExit(3)"))
    Path("syntax.py").write_text("class Task(\n")
    Path("empty.py").touch()
    Path("empty.jsonl").touch()
    Path("binary.jsonl").write_bytes(bytes(range(256)))
    Path("binary.yaml").write_bytes(bytes(range(256)))
    Path("list.yaml").write_text("- a\n")
    Path("deep.yaml").write_text("task: " + "[" * 1000 + "]" * 1000)
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("cut.png").write_bytes(Path("photo.png").read_bytes()[:40])
    Path("text.png").write_text("not an image")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "bert"}')
    write_rows("rows.csv", [{"id": 1}])
    Path("runs/unfinished/checkpoints").mkdir(parents=True)
    shutil.copy("tiny.yaml", "runs/unfinished/config.yaml")


def write_rows(name: str, rows: Sequence[object]) -> None:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_mutants(rng: random.Random) -> None:
    """Write damaged copies of recipes, rows, outputs, and of a run with its checkpoints."""
    for number in range(MUTANTS):
        for name in ("tiny.yaml", "rows.jsonl", "text.jsonl", "outputs.jsonl", "letters.py"):
            path = Path(name)
            data = mutate(path.read_bytes(), rng)
            path.with_stem(f"mutant{number}-{path.stem}").write_bytes(data)
        run = Path(rng.choice(RUNS))
        copy = Path(f"runs/mutant{number}")
        shutil.copytree(run, copy)
        path = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        kind = rng.randrange(4)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(mutate(path.read_bytes(), rng))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return data after a random change: cut, flipped, doubled, emptied, or with another token."""
    if not data:
        return b"\x00"
    at, kind = rng.randrange(len(data)), rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[at // 2 :]
    if kind == 3:
        lines = data.split(b"\n")
        lines.pop(rng.randrange(len(lines)))
        return b"\n".join(lines)
    token = rng.choice(
        [b"null", b"-1", b"[]", b"{}", b'""', b"NaN", b"1e999", b"\xff", b"9" * 5000]
    )
    words = data.split(b" ")
    words[rng.randrange(len(words))] = token
    return b" ".join(words)
