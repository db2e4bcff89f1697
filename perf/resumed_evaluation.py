"""Kill an evaluation and resume it with another number of ranks: the results must be identical.

For each embedded task the command line runs an evaluation twice: once without interruption, and
once killed (SIGKILL) as soon as some outputs are on disk and then resumed, by default on two ranks.
Predictions and results must be identical to the byte.

    python perf/resumed_evaluation.py                     500 examples of each task
    python perf/resumed_evaluation.py --count 130 --tasks counting
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

METRICS = {"counting": "exact", "grounding": "accuracy_50", "ocr": "exact"}


def build_command(folder: Path, task: str, name: str, count: int, ranks: int = 1) -> list[str]:
    """Return the command line of an evaluation into ``folder/name``."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
        launch += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    definition = folder / f"{task}.yaml"
    definition.write_text(f"title: Embedded\ntask: {task}\nmetric: {METRICS[task]}\n")
    return [
        *(*launch, "-m", "vlm_grpo.cli", "evaluate", str(definition)),
        *("--data", f"embedded:{task}", "model=embedded", "policy.dtype=float32"),
        *(f"output_dir={folder}", f"name={name}", f"data.eval_limit={count}"),
        "rollout.max_completion_length=24",
    ]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr[-3000:]}")


def run_and_kill(command: list[str], outputs: Path) -> int:
    """Kill the process when the first outputs are on disk, and return their number."""
    process = subprocess.Popen(command, stdout=-3, stderr=-3, env=environment())
    while process.poll() is None and not (outputs.exists() and outputs.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return outputs.read_bytes().count(b"\n") if outputs.exists() else 0


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def compare(folder: Path, task: str, count: int, ranks: int) -> str:
    """Run both evaluations of one task and return a line with the results.

    Raises:
        SystemExit: the results differ, or the process was not killed before its end.
    """
    began = time.monotonic()
    run(build_command(folder, task, f"{task}-uninterrupted", count))
    seconds = time.monotonic() - began
    output = folder / f"{task}-resumed" / "model"
    command = build_command(folder, task, f"{task}-resumed", count)
    kept = run_and_kill(command, output / "predictions-0.jsonl")
    if not 0 < kept < count or (output / "predictions.jsonl").exists():
        raise SystemExit(f"{task}: killed after {kept} of {count} examples, not before the end")
    run(build_command(folder, task, f"{task}-resumed", count, ranks))
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
    with TemporaryDirectory() as folder:
        for task in arguments.tasks:
            print(compare(Path(folder), task, arguments.count, arguments.ranks), flush=True)


if __name__ == "__main__":
    main()
