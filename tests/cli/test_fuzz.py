"""Random arguments of the commands that load no model: each ends in a result or one message."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dataset_files
import pytest
from commands import RECIPE, run
from dataset_files import png

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
MUTANTS = 12
"""Number of mutants of each kind of file."""


def write_files(folder: Path) -> None:
    rows = [
        {"id": f"r{n}", "image": f"images/{n}.png", "question": "How many?", "answer": n}
        for n in range(3)
    ]
    files: dict[str, Any] = {
        **{f"images/{n}.png": png(64, 56 + n) for n in range(3)},
        "rows.jsonl": rows,
        "text.jsonl": [{"id": c, "question": "Which?", "answer": c} for c in "abc"],
        "outputs.jsonl": [{"id": row["id"], "output": "1"} for row in rows],
        "letters.py": TASK.replace("PARSE", "pass"),
        "raises.py": "raise RuntimeError('no')\n",
        "exits.py": "import sys\nsys.exit(3)\n",
        "exits_later.py": TASK.replace("PARSE", "raise SystemExit(3)"),
        "syntax.py": "class Task(\n",
        **dict.fromkeys(("empty.py", "empty.jsonl"), ""),
        "binary.jsonl": bytes(range(256)),
        "deep.jsonl": "[" * 100_000,
        "cut.png": png(64, 56)[:40],
        "rows.csv": '{"id": 1}\n',
        "runs/unfinished/config.yaml": RECIPE,
    }
    for name in RUNS:
        files[f"{name}/config.yaml"] = RECIPE
        files[f"{name}/metrics.jsonl"] = '{"step": 0, "reward": 0.5}\n'
    dataset_files.write_files(folder, files)
    for name in ("folder", "runs/unfinished/checkpoints"):
        (folder / name).mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")


def write_mutants(folder: Path, rng: random.Random) -> None:
    """Write damaged copies of rows, outputs, a task and runs."""
    for number in range(MUTANTS):
        for name in ("rows.jsonl", "text.jsonl", "outputs.jsonl", "letters.py"):
            data = mutate((folder / name).read_bytes(), rng)
            (folder / f"mutant{number}-{name}").write_bytes(data)
        copy = folder / f"runs/mutant{number}"
        shutil.copytree(folder / rng.choice(RUNS), copy)
        path = rng.choice(sorted(copy.iterdir()))
        data = path.read_bytes()
        path.unlink()
        match rng.randrange(4):
            case 0:
                path.mkdir()
            case 1 | 2:
                path.write_bytes(mutate(data, rng))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return data after a random change: cut, flipped, doubled, or with another token."""
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at // 2 :]
    words = data.split(b" ")
    tokens = [b"null", b"-1", b"[]", b"{}", b'""', b"NaN", b"1e999", b"\xff", b"9" * 5000]
    words[rng.randrange(len(words))] = rng.choice(tokens)
    return b" ".join(words)


ODD = [
    *["missing.jsonl", "empty.jsonl", "binary.jsonl", "deep.jsonl", "rows.csv", "folder", "loop"],
    *["dangling", "pipe", "x" * 300, "/dev/null", "/etc/passwd", "/etc/passwd/x", "/proc/x", ""],
    *["..", "~", "\udcff.jsonl", "a\nb", "nobody/nothing", "hf:", "hf:missing", "hf::", "cut.png"],
    *["embedded:nothing", "runs", "runs/on", "runs/one/config.yaml", "mutant0-rows.jsonl"],
]


def one_of(*names: str, mutants: str | None = None) -> Callable[[random.Random], str]:
    """Return a function that draws an argument: one of the names, a mutant, or an odd path."""

    def draw(rng: random.Random) -> str:
        chance = rng.random()
        if mutants is not None and chance < 0.1:
            return mutants.format(rng.randrange(MUTANTS))
        return rng.choice(ODD) if chance < 0.17 else rng.choice(names)

    return draw


task = one_of(
    *["counting"] * 6, "grounding", "ocr", "letters.py", "raises.py", "exits.py", "exits_later.py",
    "syntax.py", "empty.py", "no.module:Task", mutants="mutant{}-letters.py",
)  # fmt: skip
data = one_of(*["rows.jsonl"] * 4, "text.jsonl", "embedded:ocr", mutants="mutant{}-rows.jsonl")
outputs = one_of("outputs.jsonl", mutants="mutant{}-outputs.jsonl")
run_folder = one_of(*RUNS, "one", "runs/unfinished", mutants="runs/mutant{}")
number = one_of("1", "2", "0", "-1", "x", "99999999999999999999")
new = one_of("out", "out/a/b", "out.png", "runs/one")
images = one_of(".", "images")
COMMANDS: dict[str, list[tuple[str | Callable[[random.Random], str], ...]]] = {
    "report": [(run_folder,), (run_folder,), ("--sweep", one_of("optim.lr", "x"))],
    "settings": [(one_of("optim", "optim.lr", "learning_rate", "use_vllm", "x"),)],
    "new-task": [(one_of("read_clock", "a b", "1x", "class"),), ("--out", new)],
    "check": [(task,), ("--data", data), ("--image-root", images), ("tags=true",),
              ("--against", data), ("--token-side", number), ("--limit", number),
              ("--preview", new), ("--data-only",)],
    "evaluate": [(task,), ("--predictions", outputs, "--data", data), ("--image-root", images),
                 ("--format", one_of("predictions", "vlm_r1", "r1_v", "lmms_eval")), ("--json",),
                 ("--frame", one_of("original", "permille", "resized")), ("--no-tags",)],
    "tasks": [],
}  # fmt: skip
"""Arguments by command; the first two are given almost always, the others sometimes."""


def draw_invocation(rng: random.Random, command: str) -> list[str]:
    words = [command]
    for position, argument in enumerate(COMMANDS[command]):
        if rng.random() < (0.97 if position < 2 else 0.4):
            words += [part if isinstance(part, str) else part(rng) for part in argument]
    if rng.random() < 0.1:
        position = rng.randrange(len(words))
        word, at = words[position], rng.randrange(len(words[position]) + 1)
        replacement = rng.choice(["", word[at : at + 1] * 2, "x", "-", "="])
        words[position] = word[:at] + replacement + word[at + 1 :]
    return words


def read_state(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change of every file but compiled task files."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir() and path.suffix != ".pyc"
    }


def find_problems(status: int, output: str, before: Any, after: Any) -> Iterator[str]:
    """Yield what is wrong with the end of a command; ``before`` and ``after`` are the files."""
    if status not in (0, 2):
        yield f"status {status}"
    # A message may hold the traceback of the task's own code.
    if "Traceback (most recent call last)" in output and " failed on example " not in output:
        yield "a traceback"
    left = [n for n in after.keys() - before.keys() if ".tmp" in n or ".lock-" in n or ".old" in n]
    if left:
        yield f"temporary files: {left}"
    if status == 2 and not output.strip():
        yield "no message"
    if status == 2 and before != after:
        yield f"status 2, but it changed {before.items() ^ after.items()}"


@pytest.mark.parametrize("command", COMMANDS)
def test_random_arguments_end_in_a_result_or_one_message(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    write_mutants(tmp_path, random.Random(0))
    for number in range(10):
        words = draw_invocation(random.Random(f"{command}-{number}"), command)
        before = read_state(tmp_path)
        status, out, err = run(capsys, *words)
        problems = list(find_problems(status, out + err, before, read_state(tmp_path)))
        assert problems == [], f"{words}\n{err}"
