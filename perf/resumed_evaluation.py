"""Kill an evaluation and resume it with another number of ranks: the results must be identical.

For each embedded task the command line runs an evaluation twice: once without interruption, and
once killed (SIGKILL) as soon as some outputs are on disk and then resumed, by default on two ranks.
Predictions and results must be identical to the byte. Each process is forked from this one, which
saves the imports.

    python perf/resumed_evaluation.py                     500 examples of each task
    python perf/resumed_evaluation.py --count 130 --tasks counting
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

# Read when torch is imported: a fork must not inherit threads.
os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

from vlm_grpo.cli import main as run_program

METRICS = {"counting": "exact", "grounding": "accuracy_50", "ocr": "exact"}


def start(folder: Path, task: str, name: str, count: int, ranks: int = 1) -> list[BaseProcess]:
    """Start an evaluation into ``folder/name``, and return its processes."""
    definition = folder / f"{task}.yaml"
    definition.write_text(f"title: Embedded\ntask: {task}\nmetric: {METRICS[task]}\n")
    words = [
        *("evaluate", str(definition), "--data", f"embedded:{task}", "model=embedded"),
        *("policy.dtype=float32", f"output_dir={folder}", f"name={name}"),
        *(f"data.eval_limit={count}", "rollout.max_completion_length=24"),
    ]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        arguments = (words, environment if ranks > 1 else {}, folder / "log")
        processes.append(multiprocessing.get_context("fork").Process(target=call, args=arguments))
        processes[-1].start()
    return processes


def call(words: list[str], environment: dict[str, str], log: Path) -> None:
    os.environ |= environment
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    run_program(words)


def finish(processes: list[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit((folder / "log").read_text()[-3000:])


def kill(process: BaseProcess, outputs: Path) -> int:
    """Kill the process when the first outputs are on disk, and return their number."""
    while process.is_alive() and not (outputs.exists() and outputs.stat().st_size):
        time.sleep(0.02)
    process.kill()
    process.join()
    return outputs.read_bytes().count(b"\n") if outputs.exists() else 0


def compare(folder: Path, task: str, count: int, ranks: int) -> str:
    """Run both evaluations of one task and return a line with the results.

    Raises:
        SystemExit: the results differ, or the process was not killed before its end.
    """
    began = time.monotonic()
    finish(start(folder, task, f"{task}-uninterrupted", count), folder)
    seconds = time.monotonic() - began
    output = folder / f"{task}-resumed" / "model"
    (process,) = start(folder, task, f"{task}-resumed", count)
    kept = kill(process, output / "predictions-0.jsonl")
    if not 0 < kept < count or (output / "predictions.jsonl").exists():
        raise SystemExit(f"{task}: killed after {kept} of {count} examples, not before the end")
    finish(start(folder, task, f"{task}-resumed", count, ranks), folder)
    for name in ("model/predictions.jsonl", "results.json"):
        expected, resumed = (
            (folder / f"{task}-{kind}" / name).read_bytes() for kind in ("uninterrupted", "resumed")
        )
        if expected != resumed:
            raise SystemExit(f"{task}: {name} differs after the resume")
    found = json.loads((folder / f"{task}-uninterrupted" / "results.json").read_text())["model"]
    low, high = found["interval"]
    return (
        f"{task}: {METRICS[task]} {found['value']:.1f} [{low:.1f}, {high:.1f}], n = {found['n']}, "
        f"{seconds:.0f} s; killed after {kept}, resumed on {ranks} ranks: identical to the byte"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="examples of each task")
    parser.add_argument("--ranks", type=int, default=2, help="processes that resume the evaluation")
    parser.add_argument("--tasks", nargs="+", default=list(METRICS), choices=list(METRICS))
    arguments = parser.parse_args()
    importlib.import_module("vlm_grpo.training.trainer")  # once, for all forks
    with TemporaryDirectory() as folder:
        for task in arguments.tasks:
            print(compare(Path(folder), task, arguments.count, arguments.ranks), flush=True)


if __name__ == "__main__":
    main()
