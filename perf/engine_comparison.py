"""Learning curves and times of the quickstart with the shared-prefix and the repeated engine.

    python perf/engine_comparison.py

trains the quickstart with both engines at the same time, one core each, seed by seed. It writes
``results/engines.json``, plots ``docs/images/engines.svg`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "engines.json"
PLOT = HERE.parent / "docs" / "images" / "engines.svg"
ENGINES = ("shared", "repeated")


def train(engine: str, seed: int) -> dict:
    """Train once; return rewards and held-out accuracy by step, and the seconds of all steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vlm_grpo.cli", "train", "quickstart", f"seed={seed}"]
        command += [f"policy.engine={engine}", f"output_dir={folder}", "name=run"]
        command += ["evaluation.every=20", "logging.samples_every=0"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "engine": engine,
        "seed": seed,
        "reward": [round(row["reward"], 4) for row in rows],
        "held_out": [[r["step"] + 1, r["eval/exact"]] for r in rows if "eval/exact" in r],
        "step_seconds": round(sum(row["time/step"] for row in rows), 1),
    }


def plot(runs: list[dict]) -> None:
    """Plot held-out accuracy over steps, one line per run."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "vlm-grpo", "font.size": 9, "axes.grid": True})
    figure, axes = plt.subplots(figsize=(6, 4))
    for run in runs:
        color = f"C{ENGINES.index(run['engine'])}"
        label = run["engine"] if run["seed"] == runs[0]["seed"] else None
        width = 5 if run["engine"] == "shared" else 1  # the lines overlap
        line = zip(*run["held_out"], strict=True)
        axes.plot(*line, color=color, label=label, linewidth=width, alpha=1 if width == 1 else 0.4)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy, n = 500 (one line per seed)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--draw", action="store_true", help="only plot the recorded results")
    options = parser.parse_args()
    if not options.draw:
        runs = []
        for seed in options.seeds:
            with ThreadPoolExecutor(len(ENGINES)) as pool:
                runs += pool.map(train, ENGINES, [seed] * len(ENGINES))
            RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    runs = json.loads(RESULTS.read_text())
    plot(runs)
    print("| engine | held-out after the last step, by seed | mean | seconds of all steps |")
    print("| --- | --- | --- | --- |")
    for engine in ENGINES:
        own_runs = [run for run in runs if run["engine"] == engine]
        last = [100 * run["held_out"][-1][1] for run in own_runs]
        seconds = statistics.fmean(run["step_seconds"] for run in own_runs)
        shown = ", ".join(f"{value:.1f}" for value in last)
        print(f"| {engine} | {shown} | {statistics.fmean(last):.1f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
