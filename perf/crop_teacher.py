"""Held-out accuracy of a teacher that sees the crop, of GRPO, and of both, on words that are small.

    OMP_NUM_THREADS=1 python perf/crop_teacher.py

makes the model to train by supervised steps, which read crops well and the words in whole images
seldom, and trains it with every method and seed. It prints the table of docs/study.md. Runs in
`results/crop_teacher.json` are not made again: after an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from saved_runs import load_runs, save_runs
from study import find_right, time_steps, value_at

from vlm_grpo import export, train
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data_scripts.make_tiny_words import draw_examples
from vlm_grpo.eval.statistics import bootstrap_interval

RESULTS = Path(__file__).with_name("results") / "crop_teacher.json"
WORLD = "tiny_words:cells=2"
"""A word in one of four places of an image of 168 x 56 pixels, alone in the crop of 84 x 28."""
SUPERVISED_STEPS, SUPERVISED_ROWS, STEPS = 75, 4800, 40
CROPS = "{source: 'embedded:ocr', name: crop}"
BASE = [
    "policy.max_pixels=9408",
    f"data.eval=[{{source: 'embedded:{WORLD}', name: tiny}}, {CROPS}]",
    f"data.train=[{{source: 'embedded:{WORLD}', name: tiny}}, {CROPS}]",
    "data.eval_limit=100", "warm_start.lr=1e-3", "warm_start.schedule=constant",
    "warm_start.steps=all", f"optim.max_steps={SUPERVISED_STEPS}", "evaluation.every=25",
]  # fmt: skip
SHORT = [
    "policy.max_pixels=9408", f"data.eval=embedded:{WORLD}", "data.eval_limit=200",
    f"evaluation.every={STEPS // 2}", f"optim.max_steps={STEPS}", "optim.prompts_per_step=16",
    "optim.lr=1e-4", "optim.schedule=constant_with_warmup", "optim.warmup_steps=5",
    "logging.samples_every=0", "logging.trackers=[]",
]  # fmt: skip
CROP = ["objective.distillation.teacher_prompt=crop", "objective.distillation.loss=jensen_shannon"]
CROP += ["objective.distillation.margin=0"]
ONLY = "objective.distillation.only=true"
FIRST = "objective.distillation.teacher_update_rate=0"
METHODS: dict[str, list[str]] = {
    "grpo": [],
    "crop": [*CROP, ONLY],
    "both": CROP,
    "crop, first policy": [*CROP, ONLY, FIRST],
    "both, first policy": [*CROP, FIRST],
}


def prepare_model(folder: Path) -> str:
    path = folder / "tiny-words"
    if not path.is_dir():
        own = ["name=supervised", f"output_dir={folder}", "seed=0"]
        settings = load_settings("ocr", [*BASE, *own, "resume=true"])
        train(settings)
        export(settings.run_dir, path)
    return str(path)


def measure(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the held-out curve and each held-out example's value at the end."""
    short = re.sub(r"\W+", "-", method)
    name = [f"name={short}-{seed}", f"output_dir={folder}", f"model={prepare_model(folder)}"]
    changes = [*SHORT, *METHODS[method]]
    settings = load_settings("ocr", [*changes, *name, f"seed={seed}"], data={"train": "python"})
    seconds = time_steps(settings, draw_examples(WORLD, SUPERVISED_ROWS + 2048)[SUPERVISED_ROWS:])
    paths = (settings.run_dir / "evaluation").glob("step-*.jsonl")
    curve = {
        int(path.stem.partition("-")[2]): find_right(map(json.loads, path.open())) for path in paths
    }
    return {
        "method": method,
        "seed": seed,
        "settings": changes,
        "cpu_seconds": round(seconds, 1),
        "held_out": [[step, round(statistics.fmean(r), 4)] for step, r in sorted(curve.items())],
        "right": "".join(str(int(value)) for value in curve[STEPS]),
    }


def format_table(runs: list[dict[str, Any]]) -> str:
    rows = [
        "| method | held-out after, by seed | equal samples, change from grpo | "
        "equal time | time |",
        "| --- | --- | --- | --- | --- |",
    ]
    found = {(run["method"], run["seed"]): run for run in runs}
    for method in METHODS:
        pairs = [
            (run, found["grpo", run["seed"]])
            for run in runs
            if run["method"] == method and ("grpo", run["seed"]) in found
        ]
        if not pairs:
            continue
        changes = [
            [100.0 * (int(a) - int(b)) for a, b in zip(run["right"], plain["right"], strict=True)]
            for run, plain in pairs
        ]
        low, high = bootstrap_interval(*changes, seed=0)
        mean = statistics.fmean(map(statistics.fmean, changes))
        timed = statistics.fmean(
            100 * (value_at(run, plain["cpu_seconds"]) - plain["held_out"][-1][1])
            for run, plain in pairs
        )
        start = 100 * statistics.fmean(run["held_out"][0][1] for run, _ in pairs)
        ends = ", ".join(f"{100 * run['held_out'][-1][1]:.1f}" for run, _ in pairs)
        seconds = statistics.fmean(run["cpu_seconds"] for run, _ in pairs)
        rows.append(
            f"| {method} | {start:.1f} → {ends} | {mean:+.1f} [{low:+.1f}, {high:+.1f}] | "
            f"{timed:+.1f} | {seconds:.0f} s |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="none: print the table")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/crop_teacher"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, method in itertools.product(options.seeds, options.methods):
        if (method, seed) not in {(run["method"], run["seed"]) for run in load_runs(RESULTS)}:
            run = measure(method, seed, options.folder)
            print(method, seed, run["held_out"], run["cpu_seconds"], "s", file=sys.stderr)
            save_runs(RESULTS, [*load_runs(RESULTS), run])
    print(format_table(load_runs(RESULTS)))


if __name__ == "__main__":
    main()
