"""Steps to a level of held-out accuracy with a curriculum, with replay and behind noisy images.

    OMP_NUM_THREADS=1 python perf/prompt_choice.py

trains the recipes on few examples with each choice and with none (uniform), one run after the
other in this process, and prints the rows of both tables of docs/sampling.md. Runs in
`results/prompt_choice.json` are not made again: after an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from saved_runs import load_runs, save_runs

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.training.trainer import train

RESULTS = Path(__file__).with_name("results") / "prompt_choice.json"
RECIPES = {"counting": ("exact", 16, 80), "grounding": ("accuracy_50", 8, 40)}
"""The recipes, with the metric that is followed, the prompts per step, and the steps."""
CHOICES = {
    "uniform": [],
    "curriculum": ["data.curriculum.pool=4"],
    "replay": ["objective.replay.size=64"],
    "noise": ["rollout.noise.strength=500"],
    "weak-noise": ["rollout.noise.strength=200"],
}
SHORT = [
    "data.train_limit=256", "data.eval_limit=200", "optim.warmup_steps=10",
    "logging.samples_every=0", "logging.trackers=[]",
]  # fmt: skip
"""The recipes as they are, but for fewer examples, prompts and steps."""
LEVEL = 0.8
"""Share of the gain of the uniform run with the same seed that is to be reached."""


def measure(recipe: str, seed: int, choice: str, folder: str) -> dict:
    """Train, and return the held-out values by step, and means of the steps' metrics."""
    changes = [f"seed={seed}", f"output_dir={folder}", f"name={recipe}-{seed}-{choice}"]
    name, prompts, steps = RECIPES[recipe]
    length = [f"optim.max_steps={steps}", f"evaluation.every={steps // 4}"]
    own = [*SHORT, f"optim.prompts_per_step={prompts}", *length, *CHOICES[choice]]
    settings = load_settings(recipe, [*own, *changes])
    started = time.process_time()
    train(settings)
    rows = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(row) for row in rows]
    first = json.loads((settings.run_dir / "evaluation" / "step-000000.json").read_text())
    later = [[m["step"] + 1, m[f"eval/{name}"]] for m in metrics if f"eval/{name}" in m]
    means = {
        key: round(statistics.fmean(m[key] for m in metrics), 4)
        for key in ("frac_reward_zero_std", "replay/groups", "curriculum/pass_rate")
        if key in metrics[0]
    }
    return {
        "recipe": recipe,
        "seed": seed,
        "choice": choice,
        "settings": own,
        "held_out": [[0, first["metrics"][name]], *later],
        "cpu_seconds": round(time.process_time() - started, 1),
        **means,
    }


def find_steps(curve: list[list[float]], level: float) -> float:
    """Return the first step at a level, between two evaluations; the last if there is none."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if low >= level:
            return before
        if high >= level:
            return before + (after - before) * (level - low) / (high - low)
    return curve[-1][0]


def format_table(runs: list[dict]) -> str:
    """Format the mean and the values of all seeds."""
    rows = ["| recipe | choice | steps to the level | held-out after | equal rewards | CPU s |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    found = {(run["recipe"], run["seed"], run["choice"]): run for run in runs}
    for recipe in RECIPES:
        for choice in CHOICES:
            own = [run for run in runs if (run["recipe"], run["choice"]) == (recipe, choice)]
            if not own:
                continue
            steps = []
            for run in own:
                first, *_, last = found[recipe, run["seed"], "uniform"]["held_out"]
                level = first[1] + LEVEL * (last[1] - first[1])
                steps.append(find_steps(run["held_out"], level))
            ends = [100 * run["held_out"][-1][1] for run in own]
            equal = statistics.fmean(100 * run["frac_reward_zero_std"] for run in own)
            rows.append(
                f"| {recipe} | {choice} | {_describe(steps, 0)} | {_describe(ends, 1)} % | "
                f"{equal:.0f} % | {statistics.fmean(run['cpu_seconds'] for run in own):.0f} |"
            )
    return "\n".join(rows)


def _describe(values: list[float], digits: int) -> str:
    listed = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.fmean(values):.{digits}f} ({listed})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = load_runs(RESULTS)
    known = {(run["recipe"], run["seed"], run["choice"]) for run in runs}
    jobs = [(r, seed, c) for seed in options.seeds for r in options.recipes for c in CHOICES]
    with tempfile.TemporaryDirectory() as folder:
        for job in [job for job in jobs if job not in known]:
            runs.append(measure(*job, folder))
            save_runs(RESULTS, runs)
    print(format_table(runs))


if __name__ == "__main__":
    main()
