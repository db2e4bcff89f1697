"""Kill a training run repeatedly (python tests/helpers/crash.py --kills 50): half of the times at a
random time, half while a checkpoint is being written. Weights, metrics and samples must equal those
of an uninterrupted run bit for bit, and ``metrics.jsonl`` must have every step once.
"""

import contextlib
import os
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

# Read when torch is imported: a fork must not inherit threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import typer
from forked import start
from small_runs import assert_same_run, read_metrics

from vlm_grpo import Settings, load_settings, train
from vlm_grpo.model.resolve import list_checkpoints

STEPS_PER_KILL = 3
"""Steps of the run per kill, so that it does not end before the last of them."""


def make_settings(folder: Path, name: str, steps: int, *more: str) -> Settings:
    """Return a small run of the embedded model: full weights, two updates per step, evaluations."""
    fixed = (
        "data.train_limit=24",  # all that are drawn; a process does so at each start
        *("data.eval_limit=4", "evaluation.every=10", "rollout.num_generations=2"),
        *("objective.num_iterations=2", "objective.beta=0.05"),
        *("objective.reference_refresh_every=2", "checkpoint.every=1"),
        *("optim.warmup_steps=0", "optim.prompts_per_step=2", f"optim.max_steps={steps}"),
        *("logging.trackers=[]", "logging.samples_every=1", "logging.samples_per_step=1"),
    )
    return load_settings("counting", [f"name={name}", f"output_dir={folder}", *fixed, *more])


def list_incomplete(run: Settings) -> set[tuple[str, int]]:
    """Return the incomplete checkpoints with the time of their last change."""
    found = set()
    for path in (run.run_dir / "checkpoints").glob(".step-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # completed or deleted just now
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def wait_for_checkpoint(
    run: Settings, process: BaseProcess, count: int, stale: set[tuple[str, int]]
) -> None:
    """Wait until the process has started to write its ``count``-th checkpoint, without those that
    the previous process has left incomplete (``stale``)."""
    started: set[str] = set()
    while len(started) < count:
        started |= {name for name, _ in list_incomplete(run) - stale}
        if not process.is_alive():
            raise SystemExit("the run ended before the last kill: raise STEPS_PER_KILL")
        time.sleep(0.001)  # a checkpoint takes far longer; the run needs the processor


def kill_once(folder: Path, steps: int, rng: random.Random, seconds: float | None) -> list[int]:
    """Kill the run within a number of seconds, or (None) while it writes a checkpoint; return how
    many incomplete checkpoints that left, and how many steps it lost."""
    run = make_settings(folder, "broken", steps, "resume=true")
    stale = list_incomplete(run)
    process = start(log := folder / "broken.log", train, run)
    if seconds is None:
        wait_for_checkpoint(run, process, rng.randint(1, 3), stale)
    time.sleep(rng.uniform(0, seconds or 0.05))
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise SystemExit(f"the run ended by itself ({process.exitcode}), see {log}")
    metrics = run.run_dir / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
    saved = [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")]
    return [len(list_incomplete(run) - stale), done - max(saved, default=0)]


def crash(folder: Path, count: int, seed: int) -> str:
    """Kill a run ``count`` times, compare it with an uninterrupted one, and return a summary."""
    steps, rng, started = STEPS_PER_KILL * count, random.Random(seed), time.monotonic()

    def finish(name: str, *more: str) -> Settings:
        run = make_settings(folder, name, steps, *more)
        process = start(log := folder / f"{name}.log", train, run)
        process.join()
        assert process.exitcode == 0, log
        return run

    uninterrupted = finish("uninterrupted")
    # A random kill comes between the start of a process and about its third step, and in the first
    # half of this time, since the machine may be quicker now than when it was measured.
    seconds = (1.0 + 3 * (time.monotonic() - started) / steps) / 2
    kills = list[list[int]]()
    while len(kills) < count:
        writing = sum(left > 0 for left, _ in kills)
        kills.append(kill_once(folder, steps, rng, None if 2 * writing <= len(kills) else seconds))
    last = finish("broken", "resume=true")
    assert [row["step"] for row in read_metrics(last.run_dir)] == list(range(steps))
    assert_same_run(uninterrupted.run_dir, last.run_dir, f"step-{steps}")
    redone = [steps for _, steps in kills]
    return (
        f"{count} kills of a run of {steps} steps (seed {seed}), {sum(n > 0 for n, _ in kills)} of "
        "them while a checkpoint was being written: the same weights, metrics and samples; each "
        f"kill repeated {sum(redone) / count:.1f} steps on average, at most {max(redone)}"
    )


def main(kills: int = 50, seed: int = 0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(crash(Path(folder), kills, seed))


if __name__ == "__main__":
    del __file__  # or every process would run this file again
    typer.run(main)
