"""Learning curves of the quickstart with each loss type and reference refresh.

    python perf/learning_curves.py

executes the runs that are missing in `results/learning.json`, each in a process with one core. Then
it plots `docs/images/learning.svg` from that file and prints the table of docs/objective.md. After
an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from saved_runs import load_runs, save_runs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "perf" / "results" / "learning.json"
PLOT = ROOT / "docs" / "images" / "learning.svg"
RECIPE = "quickstart"
EVERY = 20
"""Steps between two evaluations on the recipe's 500 held-out examples."""

LOSSES = {
    "grpo": [],
    "bnpo": ["loss_type=bnpo"],
    "dr_grpo": ["loss_type=dr_grpo"],
    "dapo": ["loss_type=dapo"],
    "cispo": ["loss_type=cispo", "epsilon_high=5"],
    "gspo": ["importance_sampling_level=sequence"],
}
TWICE = ["num_iterations=2"]
"""Two updates per step: only then do the loss types clip and differ."""
PANELS: dict[str, dict[str, list[str]]] = {
    "loss types, num_iterations = 1": LOSSES,
    "grpo: the reference, two updates": {
        "grpo": [],
        "k = 10, beta = 0.04": ["beta=0.04", "reference_refresh_every=10"],
        "never, beta = 0.04": ["beta=0.04", "reference_refresh_every=never"],
        "grpo, twice": TWICE,
    },
    "loss types, num_iterations = 2": {
        f"{name}, twice": [*changes, *TWICE] for name, changes in LOSSES.items() if name != "bnpo"
    },
}
TWINS = {"bnpo": "dapo", "cispo": "dapo", "gspo": "grpo"}
"""Pairs that are the same computation with one update. The first seed runs both and checks that all
numbers agree; the other seeds run only one."""
VARIANTS = {name: changes for panel in PANELS.values() for name, changes in panel.items()}
LABELS = {
    ("loss types, num_iterations = 1", "grpo"): "grpo = gspo",
    ("loss types, num_iterations = 1", "dapo"): "dapo = bnpo = cispo",
    # With one update and k = 1 the KL divergence and its gradient are 0, as without a KL term.
    ("grpo: the reference, two updates", "grpo"): "k = 1, or beta = 0",
}


def train(variant: str, seed: int, folder: str) -> dict:
    """Train the recipe from the command line and return the run's curves."""
    name = f"{list(VARIANTS).index(variant)}-{seed}"
    command = [sys.executable, "-m", "vlm_grpo.cli", "train", RECIPE, f"seed={seed}"]
    command += [f"name={name}", f"output_dir={folder}", f"evaluation.every={EVERY}"]
    command += ["logging.samples_every=0", *(f"objective.{c}" for c in VARIANTS[variant])]
    started = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    run = Path(folder, name)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = (run / "evaluation" / "step-000000.jsonl").read_text().splitlines()
    before = statistics.fmean(json.loads(row)["rewards"]["exact"] for row in start)
    curve = [[line["step"] + 1, line["eval/exact"]] for line in lines if "eval/exact" in line]
    return {
        "variant": variant,
        "seed": seed,
        "changes": VARIANTS[variant],
        "seconds": round(time.monotonic() - started, 1),
        "held_out": [[0, round(before, 4)], *curve],
        "n": len(start),
        "reward": [round(line["reward"], 4) for line in lines],
        "kl": [round(line["kl"], 5) for line in lines if "kl" in line],
        "clipped": [
            round(line.get("clip_ratio/region_mean", line.get("cispo_clip_ratio", 0.0)), 4)
            for line in lines
        ],
        "largest_grad_norm": round(max(line["grad_norm"] for line in lines), 3),
        "skipped_updates": sum(line["skipped_updates"] for line in lines),
    }


def measure(seeds: list[int], workers: int) -> None:
    """Run every missing variant and seed, panel by panel; each result is saved at once."""
    known = {(run["variant"], run["seed"]) for run in load_runs(RESULTS)}
    wanted = [(v, s) for panel in PANELS.values() for s in seeds for v in panel]
    missing = [
        (variant, seed)
        for variant, seed in dict.fromkeys(wanted)
        if (variant, seed) not in known and (variant not in TWINS or seed == seeds[0])
    ]
    lock = threading.Lock()

    def train_and_save(variant: str, seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = train(variant, seed, folder)
        print(variant, seed, run["held_out"][-1], f"{run['seconds']} s", file=sys.stderr)
        with lock:
            runs = [*load_runs(RESULTS), run]
            runs.sort(key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"]))
            save_runs(RESULTS, runs)

    with ThreadPoolExecutor(workers) as pool:
        for job in [pool.submit(train_and_save, *pair) for pair in missing]:
            job.result()
    check_twins(load_runs(RESULTS))


def check_twins(runs: list[dict]) -> None:
    """Exit with an error if two runs that are the same computation differ."""
    rewards = {(run["variant"], run["seed"]): run["reward"] for run in runs}
    for (variant, seed), reward in rewards.items():
        if rewards.get((TWINS.get(variant, variant), seed), reward) != reward:
            raise SystemExit(f"{variant} and {TWINS[variant]} differ with seed {seed}")


def measured_panels(runs: list[dict]) -> dict[str, list[str]]:
    """Return the panels with at least two measured variants; twins appear under one name."""
    known = {run["variant"] for run in runs} - set(TWINS)
    panels = {title: [v for v in panel if v in known] for title, panel in PANELS.items()}
    return {title: panel for title, panel in panels.items() if len(panel) > 1}


def format_table(runs: list[dict]) -> str:
    """Format the final held-out accuracy in percent: mean and range over seeds."""
    rows = [
        "| run | held-out, mean over seeds | range | seeds | reward, last 20 steps | "
        "largest gradient norm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title, panel in measured_panels(runs).items():
        rows.append(f"| *{title}* | | | | | |")
        for variant in panel:
            found = [run for run in runs if run["variant"] == variant]
            last = [100 * run["held_out"][-1][1] for run in found]
            reward = statistics.fmean(statistics.fmean(run["reward"][-20:]) for run in found)
            rows.append(
                f"| {LABELS.get((title, variant), variant)} | {statistics.fmean(last):.1f} | "
                f"{min(last):.1f} to {max(last):.1f} | {len(found)} | {reward:.2f} | "
                f"{max(run['largest_grad_norm'] for run in found):.1f} |"
            )
    return "\n".join(rows)


def plot(runs: list[dict]) -> None:
    """Plot one column per panel: held-out accuracy above, training reward below."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "vlm-grpo", "font.size": 9, "axes.grid": True})
    panels = measured_panels(runs)
    size = (4.4 * len(panels), 6.6)
    figure, axes = plt.subplots(2, len(panels), figsize=size, sharex=True, sharey="row")
    for (above, below), (title, panel) in zip(axes.T, panels.items(), strict=True):
        for variant in panel:
            found = [run for run in runs if run["variant"] == variant]
            steps = [step for step, _ in found[0]["held_out"]]
            curves = [[value for _, value in run["held_out"]] for run in found]
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            low = [min(values) for values in zip(*curves, strict=True)]
            high = [max(values) for values in zip(*curves, strict=True)]
            label = LABELS.get((title, variant), variant)
            (line,) = above.plot(steps, mean, label=label)
            above.fill_between(steps, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
            rewards = [
                statistics.fmean(values)
                for values in zip(*(run["reward"] for run in found), strict=True)
            ]
            smooth = [statistics.fmean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
            below.plot(range(1, len(smooth) + 1), smooth, color=line.get_color())
        above.set_title(title)
        above.legend(loc="lower right")
        below.set_xlabel("step")
    axes[0][0].set_ylabel("held-out accuracy (band: lowest to highest seed)")
    axes[1][0].set_ylabel("training reward (mean of ten steps)")
    figure.tight_layout()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at once; 0: only plot the recorded results"
    )
    options = parser.parse_args()
    if options.workers:
        measure(options.seeds, options.workers)
    runs = load_runs(RESULTS)
    plot(runs)
    print(format_table(runs))


if __name__ == "__main__":
    main()
