"""Run thousands of random commands and check how they end.

    python tests/helpers/fuzz_cli.py --n 2000 --seed 0

Each invocation of a command, with plausible and odd arguments, runs in a child process in a copy of
one folder. It must end in time with a documented status and without a traceback, leave no temporary
files, and with status 2 leave the files as they were. ``--only 17`` runs and shows number 17.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import dataset_files
from dataset_files import png

from vlm_grpo import cli
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import known_keys

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
    """Write everything that needs no model, and go to the folder."""
    os.chdir(folder)
    rows = [
        {"id": f"r{n}", "image": f"images/{n}.png", "question": "How many?", "answer": n}
        for n in range(3)
    ]
    files: dict[str, Any] = {
        "tiny.yaml": RECIPE,
        **{f"images/{n}.png": png(64, 56 + n) for n in range(3)},
        "photo.png": png(64, 56),
        "rows.jsonl": rows,
        "text.jsonl": [{"id": c, "question": "Which?", "answer": c} for c in "abc"],
        "outputs.jsonl": [{"id": row["id"], "output": "1"} for row in rows],
        "letters.py": TASK.replace("PARSE", "pass"),
        "raises.py": "raise RuntimeError('no')\n",
        "exits.py": "import sys\nsys.exit(3)\n",
        "exits_later.py": TASK.replace("PARSE", "raise SystemExit(3)"),
        "syntax.py": "class Task(\n",
        **dict.fromkeys(("empty.py", "empty.jsonl"), ""),
        **dict.fromkeys(("binary.jsonl", "binary.yaml"), bytes(range(256))),
        "list.yaml": "- a\n",
        "deep.yaml": "task: " + "[" * 1000 + "]" * 1000,
        "deep.jsonl": "[" * 100_000,
        "cut.png": png(64, 56)[:40],
        "text.png": "not an image",
        "model/config.json": {"model_type": "bert"},
        "rows.csv": '{"id": 1}\n',
        "runs/unfinished/config.yaml": RECIPE,
    }
    dataset_files.write_files(folder, files)
    for name in ("folder", "runs/unfinished/checkpoints"):
        Path(name).mkdir()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")


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


MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Folder of the file system in memory, if there is one."""
STATUSES = (0, 2, 75)
"""Success, an error that the user can fix, and the time limit of a run."""
TIME_LIMIT = 60.0
"""Seconds after which an invocation counts as hanging; the longest valid ones take ten."""

SLOW_IMPORTS = (
    *("model.doctor", "training.export", "eval.predict", "planning.planner", "training.trainer"),
)
KEYS = [key for key in known_keys(Settings) if key not in ("checkpoint.max_hours", "output_dir")]
VALUES = [
    *["0", "1", "2", "3", "-1", "0.5", "1e-6", "true", "false", "null", "''", "[]", "{}", "[1]"],
    *["abc", "[a,b]", "{a: 1}", ".nan", ".inf", "1e999", "[", "{", "???", "${seed}", "${nope}"],
    *["9" * 5000, "[" * 300, "2026-13-45", "é", "\udcff", "!!python/name:os.system", "&a [*a]"],
    *["full", "bfloat16", "none", "batch", "token", "never", "cosine", "language", "repeated"],
]
ODD = [
    *["missing.jsonl", "empty.jsonl", "binary.jsonl", "deep.jsonl", "rows.csv", "folder", "loop"],
    *["dangling", "pipe", "x" * 300, "/dev/null", "/etc/passwd", "/etc/passwd/x", "/proc/x", ""],
    *["..", "~", "\udcff.jsonl", "a\nb", "nobody/nothing", "hf:", "hf:missing", "hf::", "cut.png"],
    *["embedded:nothing", "deep.yaml", "list.yaml", "binary.yaml", "model", "model/config.json"],
    *["runs", "runs/on", "runs/one/config.yaml", "text.png", "exits.py", "mutant0-rows.jsonl"],
]


def one_of(*names: str, mutants: str | None = None) -> Callable[[random.Random], str]:
    """Return a function that draws an argument: one of the names, a mutant, or an odd path."""

    def draw(rng: random.Random) -> str:
        chance = rng.random()
        if mutants is not None and chance < 0.1:
            return mutants.format(rng.randrange(MUTANTS))
        return rng.choice(ODD) if chance < 0.17 else rng.choice(names)

    return draw


recipe = one_of(
    *["tiny.yaml"] * 8, "counting", "ocr", "grounding", "quickstart", "letters.py", "runs/one",
    "runs/one/config.yaml", "counting_qwen2_vl_2b", mutants="mutant{}-tiny.yaml",
)  # fmt: skip
task = one_of(
    *["counting"] * 6, "grounding", "ocr", "detection", "pointing", "letters.py", "raises.py",
    "exits.py", "exits_later.py", "syntax.py", "empty.py", "no.module:Task",
    mutants="mutant{}-letters.py",
)  # fmt: skip
data = one_of(
    *["rows.jsonl"] * 4,
    "text.jsonl",
    "embedded:counting",
    "embedded:ocr",
    mutants="mutant{}-rows.jsonl",
)
image = one_of("photo.png", "images/1.png", "cut.png", "text.png")
images = one_of(".", ".", "images")
outputs = one_of("outputs.jsonl", mutants="mutant{}-outputs.jsonl")
run = one_of(*RUNS, "one", "runs/unfinished", mutants="runs/mutant{}")
checkpoint = one_of(
    "runs/one/checkpoints/step-2", "runs/lora/checkpoints/step-1", "runs/one", "one@2", "one@x",
    mutants="runs/mutant{}/checkpoints/step-2",
)  # fmt: skip
model = one_of(
    "embedded",
    "runs/one",
    "runs/lora/checkpoints/step-2",
    "nobody/nothing",
    mutants="runs/mutant{}",
)
number = one_of("1", "2", "0", "-1", "x", "99999999999999999999")
new = one_of("out", "out/a/b", "out.png", "runs/one", "photo.png")
benchmark = one_of("refcoco", "super_clevr_200", "ocrbench", "countbenchqa")

SETTINGS = "…"
"""In ``COMMANDS``, the place of random ``key=value``."""
COMMANDS: dict[str, list[tuple[str | Callable[[random.Random], str], ...]]] = {
    "train": [(recipe,), ("name=fuzz",), (SETTINGS,), ("--task", task), ("data.train={}", data)],
    "sft": [(recipe,), ("name=fuzz",), (SETTINGS,), ("--task", task), ("data.train={}", data),
            ("warm_start.lr={}", number)],
    "sample": [(recipe,), ("--out", new), ("--samples", number), (SETTINGS,), ("--task", task),
               ("--checkpoint", checkpoint), ("--min-reward", number), ("--keep", number),
               ("--difficulty", new)],
    "evaluate": [(recipe,), (SETTINGS,), ("--checkpoint", checkpoint), ("--task", task)],
    "evaluate ": [(benchmark,), ("--data", data), ("--predictions", outputs), (SETTINGS,)],
    "predict": [(model,), ("--image", image), ("--question", one_of("How many?", "")),
                ("--task", task), ("--out", new), (SETTINGS,)],
    "predict ": [(model,), ("--server", one_of("http://127.0.0.1:9", "x")), ("--image", image),
                 ("--question", one_of("How many?", "")), ("--served-model", one_of("policy"))],
    "serve": [(model,), ("--python", one_of("photo.png", "missing")), ("--port", number),
              ("--for-rollouts",), (SETTINGS,)],
    "report": [(run,), (run,), (run,), ("--sweep", one_of("optim.lr", "policy.lora.r", "x"))],
    "settings": [(one_of("optim", "optim.lr", "learning_rate", "use_vllm", "x"),)],
    "plan": [(recipe,), ("--gpu", one_of("24GB", "H100", "x", "0GB")), ("--devices", number),
             (SETTINGS,)],
    "export": [(run,), (new,), ("--step", one_of("1")),
               ("--dtype", one_of("float32", "bfloat16", "int8")), ("--adapter",)],
    "doctor": [(model,), ("--image", image), ("--dtype", one_of("float32", "bfloat16", "x"))],
    "new-task": [(one_of("read_clock", "a b", "1x", "class"),), ("--out", new)],
    "check": [(task,), ("--data", data), ("--image-root", images), ("tags={}", one_of("true")),
              ("--against", data), ("--token-side", number), ("--limit", number),
              ("--preview", new), ("--data-only",)],
    "evaluate  ": [(task,), ("--predictions", outputs, "--data", data), ("--image-root", images),
                   ("--format", one_of("predictions", "vlm_r1", "r1_v", "lmms_eval")), ("--json",),
                   ("--frame", one_of("original", "permille", "resized")), ("--no-tags",)],
    "tasks": [],
}  # fmt: skip
"""Arguments by command; the first two are given almost always, the others sometimes."""
CHEAP = ["optim.max_steps=2", "rollout.max_completion_length=2", "optim.prompts_per_step=2",
         "rollout.num_generations=2", "data.train_limit=4", "data.eval_limit=2"]  # fmt: skip
State = dict[str, tuple[int, int]]
"""The size and the time of the last change of files by path."""


def draw_invocation(rng: random.Random, commands: list[str] | None = None) -> list[str]:
    """Return the words of a random invocation of one of the commands; None: of all."""
    command = rng.choice(commands or list(COMMANDS))
    words = command.split()
    for position, argument in enumerate(COMMANDS[command]):
        if rng.random() > (0.97 if position < 2 else 0.4):
            continue
        if argument == (SETTINGS,):
            words += rng.sample(CHEAP, len(CHEAP)) if rng.random() < 0.5 else []
            pairs = [f"{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(rng.randrange(3))]
            words += pairs + rng.choices(["resume=true", "name=one"], k=rng.randrange(2))
            continue
        parts = [part if isinstance(part, str) else part(rng) for part in argument]
        is_pair = isinstance(argument[0], str) and "{}" in argument[0]
        words += [parts[0].format(parts[1])] if is_pair else parts
    if rng.random() < 0.1 and len(words) > 1:
        position = rng.randrange(len(words))
        words[position] = misspell(words[position], rng)
    # A recipe of the package would train for minutes.
    is_long = words[0] in ("train", "sft", "sample") or (
        words[0] == "evaluate" and "--data" not in words
    )
    return [*words, *CHEAP] if is_long and rng.random() < 0.95 else words


def misspell(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return word[:at] + rng.choice(["", word[at : at + 1] * 2, "x", "-", "="]) + word[at + 1 :]


def read_state(folder: Path) -> State:
    """Return the size and the time of the last change of every file but compiled task files."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir() and path.suffix != ".pyc"
    }


def find_problems(
    words: list[str], status: int | None, output: str, before: State, after: State
) -> Iterator[str]:
    """Yield what is wrong with the end of an invocation.

    A status of None: it was killed because it took too long; ``before`` and ``after`` are states
    of ``read_state``.
    """
    if status is None:
        yield f"it ran for {TIME_LIMIT:.0f} s"
    elif status not in STATUSES:
        yield f"status {status}"
    # A message may hold the traceback of the task's own code.
    if "Traceback (most recent call last)" in output and " failed on example " not in output:
        yield "a traceback"
    if status == 2 and not output.strip():
        yield "no message"
    left = [n for n in after.keys() - before.keys() if ".tmp" in n or ".lock-" in n or ".old" in n]
    if left and status is not None:
        yield f"temporary files: {left[:3]}"
    if status == 2:
        # A run that ends with an error keeps what it has finished, in its own folder.
        changed = [n for n, state in before.items() if after.get(n) != state]
        created = list(after.keys() - before.keys())
        if words[0] in ("train", "sft", "sample"):
            changed = [n for n in changed if not n.startswith(("runs/one/", "runs/mutant"))]
            created = [n for n in created if not n.startswith("runs/")]
        if words[0] == "evaluate":
            created = [n for n in created if "/evaluation/" not in n and "benchmark-" not in n]
        if changed or created:
            yield f"status 2, but it changed {changed[:3]} and created {created[:3]}"


def start(words: list[str], folder: Path, log: Path) -> int:
    """Start a command in a child process with the folder as its own; return its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        cli.main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def wait(pid: int) -> int | None:
    """Return the exit status of a child; None after ``TIME_LIMIT``, when it is killed."""
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def copy_if_appended(source: str, target: str) -> None:
    """Copy a file to which a run appends, and link any other: none is changed in place."""
    (shutil.copy2 if source.endswith(".jsonl") else os.link)(source, target)


def build_template(folder: Path, seed: int) -> None:
    """Write the files of all invocations, with two finished runs."""
    folder.mkdir()
    here = Path.cwd()
    write_files(folder)
    for name, lora in (("one", "null"), ("lora", "{r: 2}")):
        words = ["train", "tiny.yaml", f"name={name}", f"policy.lora={lora}", "evaluation.every=1"]
        assert wait(start(words, folder, folder.parent / "log")) == 0, (
            folder.parent / "log"
        ).read_text()
    write_mutants(random.Random(seed))
    os.chdir(here)


def run_one(words: list[str], template: Path, scratch: Path) -> tuple[int | None, str, list[str]]:
    """Run an invocation in a copy of the template; return its status, output and problems."""
    shutil.rmtree(scratch, ignore_errors=True)
    unused = {f"mutant{n}" for n in range(MUTANTS)} - set("/".join(words).split("/"))
    ignore = shutil.ignore_patterns("pipe", *unused)
    shutil.copytree(template, scratch, symlinks=True, ignore=ignore, copy_function=copy_if_appended)
    os.mkfifo(scratch / "pipe")
    before = read_state(scratch)
    log = scratch.with_suffix(".log")
    status = wait(start(words, scratch, log))
    output = log.read_text("utf-8", errors="replace")
    problems = list(find_problems(words, status, output, before, read_state(scratch)))
    return status, output, problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Run random commands.")
    parser.add_argument("--n", type=int, default=2000, help="number of invocations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first one")
    parser.add_argument("--only", type=int, help="run only this one, and show its output")
    options = parser.parse_args()
    for module in SLOW_IMPORTS:  # once, before the processes are forked
        import_module(f"vlm_grpo.{module}")
    numbers = range(options.start, options.start + options.n)
    ends: Counter[tuple[str, object]] = Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as folder:
        template = Path(folder, "template")
        build_template(template, options.seed)
        for number in numbers if options.only is None else [options.only]:
            words = draw_invocation(random.Random(f"{options.seed}-{number}"))
            status, output, problems = run_one(words, template, Path(folder, "work"))
            known = words[0] in {command.split()[0] for command in COMMANDS}
            ends[words[0] if known else "misspelled", status] += 1
            if problems or options.only is not None:
                failures += bool(problems)
                shown = [word if len(word) < 80 else f"{word[:80]}…" for word in words]
                print(f"{number}: {'; '.join(problems)}\n  {shown}\n{output[-3000:]}", flush=True)
    statuses = sorted({status for _, status in ends}, key=str)
    print(f"{'':12}", *(f"{status!s:>6}" for status in statuses))
    for command in sorted({command for command, _ in ends}):
        print(f"{command:12}", *(f"{ends[command, status]:6}" for status in statuses))
    print(f"{sum(ends.values())} invocations, {failures} with a problem")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
