"""Held-out accuracy of the embedded model's recipes before and after training, over seeds.

    python perf/recipe_accuracy.py --seeds 0 1 2 --out perf/results/recipes.json

Each run is a separate process, started from the command line; two run at once, on one core each.
``cpu_seconds`` leave out the time in which other processes had the core, which ``seconds`` count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RECIPES = ("counting", "grounding", "ocr")
_LINE = re.compile(r"^(before|after) .*?([\d.]+)% \[([\d.]+)%, ([\d.]+)%\] \(n = (\d+)\)", re.M)


def run(recipe: str, seed: int, overrides: list[str], folder: str) -> dict:
    name = f"{recipe}-{seed}-{abs(hash(tuple(overrides)))}"
    command = [sys.executable, "-m", "vlm_grpo.cli", "train", recipe, f"seed={seed}"]
    command += [f"name={name}", f"output_dir={folder}", *overrides]
    started = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = Path(folder, f"{name}.log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    found = {kind: values for kind, *values in _LINE.findall(log.read_text())}
    print(recipe, seed, overrides, found, file=sys.stderr)
    return {
        "recipe": recipe,
        "seed": seed,
        "overrides": overrides,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        **{kind: float(values[0]) for kind, values in found.items()},
        "interval_after": [float(found["after"][1]), float(found["after"][2])],
        "n": int(found["after"][3]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--set", nargs="*", default=[], help="settings, for example policy.lora.r=16"
    )
    parser.add_argument("--at-once", type=int, default=2, help="number of runs at a time")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        jobs = [
            pool.submit(run, recipe, seed, options.set, folder)
            for recipe in options.recipes
            for seed in options.seeds
        ]
        results = [job.result() for job in jobs]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("| recipe | before | after, by seed | CPU seconds of a run |")
    print("| --- | --- | --- | --- |")
    for recipe in options.recipes:
        runs = [r for r in results if r["recipe"] == recipe]
        after = ", ".join(f"{r['after']:.1f}" for r in runs)
        seconds = ", ".join(f"{r['cpu_seconds']:.0f}" for r in runs)
        print(f"| {recipe} | {runs[0]['before']:.1f} | {after} | {seconds} |")


if __name__ == "__main__":
    main()
