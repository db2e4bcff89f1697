"""Held-out accuracy of GRPO's variants, at equal samples and at equal processor time.

    OMP_NUM_THREADS=1 python perf/study.py

trains every task with every method and seed, one run after the other in this process, from the same
weights. Then it prints the table of docs/study.md. Runs in `results/study.json` are not made again:
after an interruption the same command resumes. The models of the hard worlds are made first, in
`--folder`: a supervised run, whose middle is the model to train and whose end is the teacher.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from saved_runs import load_runs, save_runs

from vlm_grpo import export, train
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.objects import Rows
from vlm_grpo.data_scripts import make_shapes, make_words
from vlm_grpo.eval.statistics import bootstrap_interval
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Example

RESULTS = Path(__file__).with_name("results") / "study.json"
SUPERVISED_ROWS = 4096
"""The first rows of each source, on which the supervised runs train, and these runs do not."""
MODEL_STEP, TEACHER_STEP = 600, 1200
"""Steps of the supervised run, the recipe ``worlds``: the model to train and the teacher."""
STEPS = 60
SHORT = [
    "data.eval_limit=300", f"evaluation.every={STEPS // 2}", f"optim.max_steps={STEPS}",
    "optim.prompts_per_step=16", "optim.lr=1e-4", "optim.schedule=constant_with_warmup",
    "optim.warmup_steps=5",
    "logging.samples_every=0", "logging.trackers=[]",
]  # fmt: skip
"""The recipes as they are, but for these settings."""
TASKS = {"words": "ocr", "handwriting": "ocr", "attributes": "counting"}
"""The hard worlds, and the recipe of each."""
TEACHER = "objective.distillation.teacher={teacher}"
METHODS: dict[str, list[str]] = {
    "grpo": [],
    "reinforce_plus_plus": ["objective.advantage_estimator=reinforce_plus_plus_baseline"],
    "two updates": ["objective.num_iterations=2"],
    "high entropy": ["objective.top_entropy_quantile=0.2"],
    "papo": ["objective.perception.kl_coef=0.01"],
    "vppo": ["objective.perception.top_share=0.4", "objective.perception.min_scale=0.9"],
    "noise": ["rollout.noise.strength=200"],
    "curriculum": ["data.curriculum.pool=4", "data.train_limit=256"],
    "replay": ["objective.replay.size=64"],
    "teacher": [TEACHER],
    "teacher only": [TEACHER, "objective.distillation.only=true"],
    "supervised": ["warm_start.steps=all", "warm_start.lr=1e-4"],
    "trl": [],
}
"""Settings of each method; ``supervised`` trains on the gold answers of the same images, and
``trl`` is TRL's GRPOTrainer with the settings of ``grpo``."""


def time_steps(settings: Settings, rows: Rows) -> float:
    """Train, and return the processor seconds of the steps, without those of evaluations."""
    step, seconds = Trainer.step, 0.0

    def measured(self: Trainer) -> dict[str, float]:
        nonlocal seconds
        started = time.process_time()
        try:
            return step(self)
        finally:
            seconds += time.process_time() - started

    Trainer.step = measured
    try:
        train(settings, data=rows)
    finally:
        Trainer.step = step
    return seconds


def prepare_models(folder: Path) -> tuple[str, str]:
    """Return the model that is trained and the teacher, and make them if they are missing."""
    found = [folder / f"worlds-{step}" for step in (MODEL_STEP, TEACHER_STEP)]
    settings = load_settings(
        "worlds",
        [
            *("name=supervised-worlds", f"output_dir={folder}", f"optim.max_steps={TEACHER_STEP}"),
            *("data.eval_limit=150", "checkpoint.every=300", "checkpoint.keep_last=0"),
        ],
    )
    export_steps(settings, dict(zip(found, (MODEL_STEP, TEACHER_STEP), strict=True)))
    return str(found[0]), str(found[1])


def export_steps(settings: Settings, steps: dict[Path, int]) -> None:
    """Write checkpoints of a run as those model folders that are missing; make a missing run."""
    for path, step in steps.items():
        if not path.is_dir():
            if not settings.run_dir.exists():
                train(settings)
            export(f"{settings.run_dir}@{step}", path)


def measure(task: str, method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the held-out curve and each held-out example's value at the end."""
    model, teacher = prepare_models(folder)
    source = f"embedded:{task}:hard"
    changes = [*SHORT, f"data.eval={source}", *METHODS[method]]
    name = f"{task}-{method.replace(' ', '-')}-{seed}"
    own = [f"name={name}", f"output_dir={folder}", f"model={model}", f"seed={seed}"]
    settings = load_settings(
        TASKS[task],
        [*(change.format(teacher=teacher) for change in changes), *own],
        data={"train": "python"},
    )
    rows = draw_rows(source)
    if method == "trl":
        # The import of TRL takes long, and the other methods do not need it.
        seconds, curve = import_module("study_trl").train_with_trl(settings, rows)
    else:
        seconds = time_steps(settings, rows)
        paths = (settings.run_dir / "evaluation").glob("step-*.jsonl")
        curve = {
            int(path.stem.partition("-")[2]): [json.loads(row) for row in path.open()]
            for path in paths
        }
    held_out = {step: find_right(rows) for step, rows in sorted(curve.items())}
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "settings": changes,
        "cpu_seconds": round(seconds, 1),
        "held_out": [[step, round(statistics.fmean(right), 4)] for step, right in held_out.items()],
        "right": "".join(str(int(value)) for value in held_out[STEPS]),
    }


@cache
def draw_rows(source: str) -> tuple[Example, ...]:
    """Draw 2,048 examples that no supervised run has seen."""
    name = source.removeprefix("embedded:")
    modules = [make_words.draw_examples, make_shapes.draw_examples]
    draw = next(d for d in modules if name.partition(":")[0] in d.kinds)
    return tuple(draw(name, SUPERVISED_ROWS + 2048)[SUPERVISED_ROWS:])


def find_right(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Return 1 for each held-out example that is right, by its exact answer or an IoU of 0.5."""
    scores = [{**row["rewards"], **row["metrics"]} for row in rows]
    return [score["accuracy_50"] if "accuracy_50" in score else score["exact"] for score in scores]


def value_at(run: dict[str, Any], seconds: float) -> float:
    """Return the held-out accuracy after some processor seconds, between two evaluations; its last
    value if the run took less."""
    curve = run["held_out"]
    step = seconds / run["cpu_seconds"] * curve[-1][0]
    for (before, low), (after, high) in itertools.pairwise(curve):
        if step <= after:
            return low + (high - low) * (step - before) / (after - before)
    return curve[-1][1]


def format_table(runs: list[dict[str, Any]]) -> str:
    """Format each method's difference from ``grpo`` with the same seeds, in points."""
    rows = [
        "| task | method | held-out after, by seed | equal samples, change from grpo | "
        "equal time | time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    found = {(run["task"], run["method"], run["seed"]): run for run in runs}
    for task in TASKS:
        for method in METHODS:
            pairs = [
                (run, found[task, "grpo", seed])
                for (t, m, seed), run in sorted(found.items())
                if (t, m) == (task, method) and (task, "grpo", seed) in found
            ]
            if pairs:
                rows.append(f"| {task} | {method} | {_describe(pairs)} |")
    return "\n".join(rows)


def _describe(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ends = [100 * run["held_out"][-1][1] for run, _ in pairs]
    changes = [
        [100.0 * (int(a) - int(b)) for a, b in zip(run["right"], plain["right"], strict=True)]
        for run, plain in pairs
    ]
    mean = statistics.fmean(statistics.fmean(part) for part in changes)
    low, high = bootstrap_interval(*changes, seed=0)
    timed = [
        100 * (value_at(run, plain["cpu_seconds"]) - plain["held_out"][-1][1])
        for run, plain in pairs
    ]
    ratio = statistics.fmean(run["cpu_seconds"] / plain["cpu_seconds"] for run, plain in pairs)
    start = 100 * statistics.fmean(run["held_out"][0][1] for run, _ in pairs)
    listed = f"{start:.1f} → {', '.join(f'{value:.1f}' for value in ends)}"
    if all(run is plain for run, plain in pairs):
        return f"{listed} | – | – | {pairs[0][0]['cpu_seconds']:.0f} s"
    change = f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"{listed} | {change} | {statistics.fmean(timed):+.1f} | × {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="none: print the table")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="models and runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {(run["task"], run["method"], run["seed"]) for run in load_runs(RESULTS)}
    jobs = itertools.product(options.tasks, options.seeds, options.methods)
    for task, seed, method in jobs:
        if (task, method, seed) not in known:
            run = measure(task, method, seed, options.folder)
            print(task, method, seed, run["held_out"], run["cpu_seconds"], "s", file=sys.stderr)
            save_runs(RESULTS, [*load_runs(RESULTS), run])
    print(format_table(load_runs(RESULTS)))


if __name__ == "__main__":
    main()
