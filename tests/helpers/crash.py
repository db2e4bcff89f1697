"""Kill a training run repeatedly, and compare its result with that of an uninterrupted run.

    python tests/helpers/crash.py --kills 50

Half of the kills come at a random time, half while a checkpoint is being written. Each is a SIGKILL
to a process that is forked from this one, which saves the imports. Weights, metrics and samples
must equal those of the uninterrupted run bit for bit, and ``metrics.jsonl`` must have every step
once.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Read when torch is imported: a fork must not inherit threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from small_runs import assert_same_run, read_metrics

from vlm_grpo import Settings, load_settings, train
from vlm_grpo.model.resolve import list_checkpoints

STEPS_PER_KILL = 3
"""Steps of the run per kill, so that it does not end before the last of them."""


@dataclass
class Kills:
    writing: int = 0  # kills that left an incomplete checkpoint
    anywhere: int = 0  # other kills
    redone: list[int] = field(default_factory=list)  # steps that each kill lost


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


def start(settings: Settings, log: Path) -> int:
    """Train in a forked process and return its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        train(settings)
        status = 0
    finally:
        os._exit(status)


def list_incomplete(run: Settings) -> set[tuple[str, int]]:
    """Return the incomplete checkpoints with the time of their last change."""
    found = set()
    for path in (run.run_dir / "checkpoints").glob(".step-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # completed or deleted just now
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def wait_for_checkpoint(
    run: Settings, process: int, count: int, stale: set[tuple[str, int]]
) -> None:
    """Wait until the process has started to write its ``count``-th checkpoint.

    ``stale`` are incomplete checkpoints that the previous process has left.
    """
    started: set[str] = set()
    while len(started) < count:
        started |= {name for name, _ in list_incomplete(run) - stale}
        if os.waitpid(process, os.WNOHANG)[0]:
            raise SystemExit("the run ended before the last kill: raise STEPS_PER_KILL")
        time.sleep(0.001)  # a checkpoint takes far longer; the run needs the processor


def count_steps(run: Settings) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def kill_once(folder: Path, steps: int, rng: random.Random, seconds: float, kills: Kills) -> None:
    run = make_settings(folder, "broken", steps, "resume=true")
    stale = list_incomplete(run)
    process = start(run, folder / "broken.log")
    if kills.writing <= kills.anywhere:
        wait_for_checkpoint(run, process, rng.randint(1, 3), stale)
        time.sleep(rng.uniform(0, 0.05))
    else:
        # In the first half, since the machine may be quicker now than when it was measured.
        time.sleep(rng.uniform(0, seconds / 2))
    os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status != -signal.SIGKILL:
        raise SystemExit(f"the run ended by itself ({status}), see {folder / 'broken.log'}")
    if list_incomplete(run) - stale:
        kills.writing += 1
    else:
        kills.anywhere += 1
    saved = [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")]
    kills.redone.append(count_steps(run) - max(saved, default=0))


def crash(folder: Path, count: int, seed: int) -> str:
    """Kill a run ``count`` times, compare it with an uninterrupted one, and return a summary."""
    steps, rng, kills = STEPS_PER_KILL * count, random.Random(seed), Kills()
    uninterrupted = make_settings(folder, "uninterrupted", steps)
    started = time.monotonic()
    process = start(uninterrupted, log := folder / "uninterrupted.log")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, log
    # A random kill comes between the start of a process and about its third step.
    seconds = 1.0 + 3 * (time.monotonic() - started) / steps
    while kills.writing + kills.anywhere < count:
        kill_once(folder, steps, rng, seconds, kills)
    last = make_settings(folder, "broken", steps, "resume=true")
    process = start(last, folder / "broken.log")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, folder / "broken.log"
    rows = read_metrics(last.run_dir)
    assert [row["step"] for row in rows] == list(range(steps))
    assert_same_run(uninterrupted.run_dir, last.run_dir, f"step-{steps}")
    return (
        f"{count} kills of a run of {steps} steps (seed {seed}), {kills.writing} of them while a "
        f"checkpoint was being written: the same weights, metrics and samples; each kill repeated "
        f"{sum(kills.redone) / count:.1f} steps on average, at most {max(kills.redone)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(crash(Path(folder), options.kills, options.seed))


if __name__ == "__main__":
    main()
