"""Step time and peak memory of each kind of reference policy and of masked images, beside none.

    python perf/reference_cost.py --out perf/results/reference_cost.json

Time: one process holds a trainer of each kind, on copies of one random model. The trainers take
turns, and a ratio compares two steps of the same turn. On a CPU the time of a step is its processor
time, which is independent of other processes. Memory: each kind runs in a separate process; the
figure is the peak above the interpreter with the loaded model.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import PeakMemory, synchronize
from PIL import Image
from random_models import build_random_model
from step_time_vlm_grpo import build_trainer

from vlm_grpo.training.trainer import Trainer

KINDS: dict[str, dict[str, Any]] = {
    "none (beta = 0)": {},
    "k = 1": {"beta": 0.04, "reference_refresh_every": 1},
    "k = 5": {"beta": 0.04, "reference_refresh_every": 5},
    "never": {"beta": 0.04, "reference_refresh_every": "never"},
    "masked images": {"perception": {"kl_coef": 0.01, "top_share": 0.4, "min_scale": 0.9}},
}
NONE = next(iter(KINDS))
WEIGHTS = ("full", "lora")
MEASURED = ("time", *KINDS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="35m", help="a name in perf/random_models.py")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--image", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt, G")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per completion")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after one warm-up step")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--weights", choices=WEIGHTS, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=MEASURED, help=argparse.SUPPRESS)
    return parser.parse_args()


def build_trainers(
    options: argparse.Namespace, kinds: list[str]
) -> tuple[list[Trainer], PeakMemory]:
    """Build a trainer of each kind on the same model and images, and start measuring memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    model, processor = build_random_model(options.size, dtype, device, max_pixels=options.image**2)
    random = np.random.default_rng(0)
    shape = (options.image, options.image, 3)
    count = options.prompts * (options.steps + 1)
    images = [Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]
    options.full, options.checkpointing = options.weights == "full", "none"
    memory, trainers = PeakMemory(device), []
    for kind in kinds:
        options.objective = KINDS[kind]
        own_model = copy.deepcopy(model) if len(kinds) > 1 else model
        trainers.append(build_trainer(options, own_model, processor, images))
    return trainers, memory


def run_step(trainer: Trainer) -> float:
    """Run one step; return its processor time on a CPU, its wall-clock time on a GPU."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    synchronize()
    started = clock()
    trainer.step()
    synchronize()
    return clock() - started


def run_child(options: argparse.Namespace) -> dict:
    if options.child == "time":
        trainers, _ = build_trainers(options, list(KINDS))
        turns = [[run_step(trainer) for trainer in trainers] for _ in range(options.steps + 1)]
        return {kind: [turn[i] for turn in turns[1:]] for i, kind in enumerate(KINDS)}
    (trainer,), memory = build_trainers(options, [options.child])
    for _ in range(2):
        run_step(trainer)
    return {"peak_bytes": memory.peak()}


def main() -> None:
    options = parse_arguments()
    if options.child:
        print(json.dumps(run_child(options)))
        return
    results: dict[str, dict] = {}
    for weights, measured in itertools.product(WEIGHTS, MEASURED):
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += ["--weights", weights, "--child", measured]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results.setdefault(weights, {})[measured] = found
        print(weights, measured, found, file=sys.stderr)
    if options.out:
        hidden = ("out", "weights", "child")
        settings = {name: value for name, value in vars(options).items() if name not in hidden}
        options.out.write_text(json.dumps({"settings": settings, **results}, indent=1) + "\n")
    print(format_table(results))


def format_table(results: dict[str, dict]) -> str:
    rows = [
        "| weights | reference | seconds per step | relative to none: median (quartiles) | "
        "peak MB | relative to none |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for weights, kind in itertools.product(WEIGHTS, KINDS):
        found, none = results[weights][kind], results[weights][NONE]
        seconds = results[weights]["time"]
        pairs = zip(seconds[kind], seconds[NONE], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        rows.append(
            f"| {weights} | {kind} | {statistics.median(seconds[kind]):.2f} | "
            f"{middle:.2f} ({low:.2f} to {high:.2f}) | "
            f"{found['peak_bytes'] / 1e6:.0f} | {found['peak_bytes'] / none['peak_bytes']:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
