"""Kill a training run again and again, and compare what it comes to with a run left alone.

    python tests/crash.py --kills 50

Half of the kills come at a random moment, half while a checkpoint is being written. Each is a
SIGKILL to a process of its own, forked from this one so that nothing has to be imported anew.
Weights, metrics and samples must be those of the unbroken run bit for bit, and every step must
stand in ``metrics.jsonl`` once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

# Read when torch is imported: a fork must not inherit threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from small_runs import assert_same_run, metrics_of

from vlm_grpo.checkpoint.store import list_checkpoints
from vlm_grpo.config.run import Settings, load_settings
from vlm_grpo.trainer import train

STEPS_PER_KILL = 3
"""Steps of the run for each kill, so that it is not over before the last of them."""


@dataclass
class Kills:
    """What has been done to a run.

    Attributes:
        writing: kills that left a half-written checkpoint behind.
        anywhere: the others.
        redone: steps that were lost with a process and done again by the next.
    """

    writing: int = 0
    anywhere: int = 0
    redone: list[int] = field(default_factory=list)


def settings_of(folder: Path, name: str, steps: int, *more: str) -> Settings:
    """A small run of the embedded model: full weights, two updates a step, and evaluations."""
    return load_settings(
        "counting",
        [
            f"name={name}",
            f"output_dir={folder}",
            "data.train_limit=4096",
            "data.eval_limit=4",
            "evaluation.every=10",
            "rollout.num_generations=2",
            "objective.num_iterations=2",
            "objective.beta=0.05",
            "objective.reference_refresh_every=2",
            "optim.warmup_steps=0",
            "optim.prompts_per_step=2",
            f"optim.max_steps={steps}",
            "checkpoint.every=1",
            "logging.trackers=[]",
            "logging.samples_every=1",
            "logging.samples_per_step=1",
            *more,
        ],
    )


def start(settings: Settings, log: Path) -> int:
    """Train in a process of its own; returns its number."""
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


def ended(process: int) -> int | None:
    """The process's exit status, None while it runs."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def half_written(run: Settings) -> set[tuple[str, int]]:
    """Checkpoints that were begun and not finished, with the time of their last change."""
    found = set()
    for path in (run.run_dir / "checkpoints").glob(".step-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # finished, or swept up, just now
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def wait_for_a_checkpoint(
    run: Settings, process: int, which: int, left: set[tuple[str, int]]
) -> None:
    """Until the process has begun to write its ``which``-th checkpoint.

    Args:
        left: what the process before has left behind.
    """
    seen: set[str] = set()
    while len(seen) < which:
        seen |= {name for name, _ in half_written(run) - left}
        if ended(process) is not None:
            raise SystemExit("the run was over before the last kill: raise STEPS_PER_KILL")


def steps_in(run: Settings) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def kill_once(folder: Path, steps: int, draw: random.Random, seconds: float, done: Kills) -> None:
    """Go on with the run, and kill it."""
    asynchronous = draw.choice(["true", "false"])
    run = settings_of(
        folder, "broken", steps, "resume=true", f"checkpoint.asynchronous={asynchronous}"
    )
    left = half_written(run)
    process = start(run, folder / "broken.log")
    if done.writing <= done.anywhere:
        wait_for_a_checkpoint(run, process, draw.randint(1, 3), left)
        time.sleep(draw.uniform(0, 0.05))
    else:
        time.sleep(draw.uniform(0, seconds))
    os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status != -signal.SIGKILL:
        raise SystemExit(f"the run ended by itself ({status}), see {folder / 'broken.log'}")
    if half_written(run) - left:
        done.writing += 1
    else:
        done.anywhere += 1
    saved = [moment.steps for moment, _ in list_checkpoints(run.run_dir / "checkpoints")]
    done.redone.append(steps_in(run) - max(saved, default=0))


def crash(folder: Path, kills: int, seed: int) -> str:
    """Kill a run ``kills`` times and compare it with an unbroken one; returns what was done.

    Raises:
        AssertionError: they differ.
    """
    steps, draw, done = STEPS_PER_KILL * kills, random.Random(seed), Kills()
    whole = settings_of(folder, "whole", steps)
    began = time.monotonic()
    process = start(whole, folder / "whole.log")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, folder / "whole.log"
    # A random kill comes somewhere between the start of a process and its third step or so.
    seconds = 1.0 + 3 * (time.monotonic() - began) / steps
    while done.writing + done.anywhere < kills:
        kill_once(folder, steps, draw, seconds, done)
    last = settings_of(folder, "broken", steps, "resume=true")
    process = start(last, folder / "broken.log")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, folder / "broken.log"
    rows = metrics_of(last.run_dir)
    assert [row["step"] for row in rows] == list(range(steps))
    assert_same_run(whole.run_dir, last.run_dir, f"step-{steps}")
    return (
        f"{kills} kills of a run of {steps} steps (seed {seed}), {done.writing} of them while a "
        f"checkpoint was being written: the same weights, metrics and samples; a kill cost "
        f"{sum(done.redone) / kills:.1f} steps done again, at most {max(done.redone)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(crash(Path(place), options.kills, options.seed))
