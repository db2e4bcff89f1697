"""Held-out accuracy of methods where right answers are rare, at equal time, tokens and samples.

    OMP_NUM_THREADS=1 python perf/rare_success.py

makes a model for each world by supervised steps, which reads crops well and whole images almost
never, and trains it with every method and seed. Then it prints the tables of docs/study.md, and
plots docs/images/rare_success.svg. Runs in `results/rare_success.json` are not made again: after
an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from saved_runs import load_runs, save_runs
from study import find_right, time_steps, value_at

from vlm_grpo import export, train
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts.make_tiny_words import draw_examples
from vlm_grpo.eval.statistics import RESAMPLES

RESULTS = Path(__file__).with_name("results") / "rare_success.json"
PLOT = Path(__file__).resolve().parents[1] / "docs" / "images" / "rare_success.svg"


@dataclass(frozen=True)
class World:
    """A world, and the supervised steps that make the model to train."""

    recipe: str
    source: str  # of the images to train on and to evaluate
    supervised: str  # of the whole images in supervised steps, which have nine cells
    crops: str  # of images that are one cell
    options: tuple[str, ...] = ()  # settings of the task


WORLDS = {
    "words": World(
        *("ocr", "tiny_words:cells=3", "tiny_words:cells=3", "tiny_words:cells=1"),
        # As in the other world, only right answers are rewarded.
        ("task_options.weights={exact: 1, character_accuracy: 0}",),
    ),
    "objects": World(
        *("numeric", "tiny_objects:cells=2,rows=1,held_out=false", "tiny_objects:cells=3"),
        "tiny_objects:cells=1,rows=1,held_out=false",
    ),
}
SUPERVISED = 30
"""Supervised steps, with a weight of 0.15 of whole images beside 1 of crops."""
EVERY, PROMPTS = 20, 8
"""Steps between two evaluations; prompts of a step with 8 completions each."""
UNITS = "cpu_seconds", "tokens", "samples"
"""Of what the compared runs have taken equally much."""
SHARED = ["rollout.max_completion_length=12", "logging.samples_every=0", "logging.trackers=[]"]
SHORT = [
    "optim.schedule=constant_with_warmup", "optim.warmup_steps=5", "data.eval_limit=200",
    f"evaluation.every={EVERY}", "warm_start=null",
]  # fmt: skip
CROP = [f"objective.distillation.{change}" for change in (
    "teacher_prompt=crop", "loss=jensen_shannon", "margin=0",
)]  # fmt: skip
ONLY = "objective.distillation.only=true"
FIRST = [ONLY, "objective.distillation.teacher_update_rate=0"]
NARROW = [f"optim.prompts_per_step={PROMPTS}", "rollout.num_generations=8"]
WIDE = [f"optim.prompts_per_step={PROMPTS // 8}", "rollout.num_generations=64"]
BEST = ["objective.replay.size=64", "objective.replay.max_age=60", "objective.replay.completions=8"]
CROP_ROLLOUTS = "methods=[{file: crop_rollouts, options: {margin: 0}}]"
METHODS: dict[str, tuple[int, str, list[str]]] = {
    "grpo": (60, "1e-4", NARROW),
    "crop": (40, "3e-4", [*NARROW, *CROP, ONLY]),
    "both": (40, "3e-4", [*NARROW, *CROP]),
    "crop, first policy": (40, "3e-4", [*NARROW, *CROP, *FIRST]),
    "two means": (40, "3e-4", [*NARROW, *CROP, *FIRST, "objective.distillation.high_share=0.2"]),
    "crop rollouts": (60, "1e-4", [*NARROW, CROP_ROLLOUTS]),
    "revision": (60, "1e-4", [*NARROW, "methods=[revision]"]),
    "wide": (60, "1e-4", WIDE),
    "wide, replay": (60, "1e-4", [*WIDE, "objective.replay.size=16"]),
    "wide, best kept": (60, "1e-4", [*WIDE, *BEST]),
}
LONGER = ", twice the steps"
METHODS |= {
    name + LONGER: (2 * steps, rate, changed)
    for name, (steps, rate, changed) in METHODS.items()
    if name in ("grpo", "both", "crop, first policy", "crop rollouts")
}
"""Steps, so that all take about as long; the learning rate; and the settings. All sample as many
completions in a step: 8 prompts with 8 of each, or 1 with 64."""


def prepare_model(name: str, folder: Path) -> str:
    """Return the model to train; make it, and save what it reads, if it is missing."""
    path, world = folder / f"start-{name}", WORLDS[name]
    if not path.is_dir():
        crop = f"{{source: 'embedded:{world.crops}', name: crop}}"
        seen = f"{{source: 'embedded:{world.supervised}', name: whole, weight: 0.15}}"
        whole = f"{{source: 'embedded:{world.source}', name: whole}}"
        changes = [
            *("warm_start.steps=all", "warm_start.lr=1e-3", "warm_start.schedule=constant"),
            *("warm_start.warmup_steps=0", "optim.prompts_per_step=32", "data.train_limit=8000"),
            *(f"data.train=[{crop}, {seen}]", f"data.eval=[{whole}, {crop}]"),
            *("data.eval_limit=200", "policy.max_pixels=100000", "seed=0", "resume=true"),
            *(f"optim.max_steps={SUPERVISED}", f"evaluation.every={SUPERVISED}"),
            *(f"name=supervised-{name}", f"output_dir={folder}"),
        ]
        settings = load_settings(world.recipe, [*SHARED, *world.options, *changes])
        train(settings)
        rows = (settings.run_dir / "evaluation" / f"step-{SUPERVISED:06d}.jsonl").open()
        right: dict[str, list[float]] = {"whole": [], "crop": []}
        for row in map(json.loads, rows):
            scores, source = {**row["rewards"], **row["metrics"]}, row["source"]
            right[source].append(scores[f"{source}/exact"])
        found = {source: statistics.fmean(values) for source, values in right.items()}
        save_runs(RESULTS, [*load_runs(RESULTS), {"world": name, "method": "start", **found}])
        export(settings.run_dir, path)
    return str(path)


def measure(name: str, method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the values of the held-out examples at each evaluation."""
    world = WORLDS[name]
    steps, rate, changed = METHODS[method]
    changes = [*SHARED, *SHORT, *world.options, f"data.eval=embedded:{world.source}", *changed]
    changes += [f"optim.max_steps={steps}", f"optim.lr={rate}"]
    short = re.sub(r"\W+", "-", method)
    own = [f"name={name}-{short}-{seed}", f"output_dir={folder}"]
    own += [f"model={prepare_model(name, folder)}", f"seed={seed}"]
    settings = load_settings(world.recipe, [*changes, *own], data={"train": "python"})
    seconds = time_steps(settings, draw_examples(world.source, 1024))
    return {
        "world": name,
        "method": method,
        "seed": seed,
        "settings": changes,
        **describe_run(settings, seconds),
    }


def describe_run(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return what a run took, and its values of the held-out examples at each evaluation."""
    paths = sorted((settings.run_dir / "evaluation").glob("step-*.jsonl"))
    count = settings.optim.prompts_per_step * settings.rollout.num_generations
    return {
        "cpu_seconds": round(seconds, 1),
        "tokens": count_tokens(settings),
        "samples": count * int(settings.optim.max_steps),
        "right": {
            int(path.stem.partition("-")[2]): "".join(
                str(int(value)) for value in find_right(map(json.loads, path.open()))
            )
            for path in paths
        },
    }


def count_tokens(settings: Settings) -> int:
    """Count the tokens that the model read or sampled in the steps of a run, all passes together;
    a token that is read for several completions at once is one."""
    rows = [*map(json.loads, (settings.run_dir / "metrics.jsonl").open())]
    count = settings.optim.prompts_per_step * settings.rollout.num_generations
    sampled = sum(row.get("completions/mean_length", 0) for row in rows) * count
    return round(sampled + sum(r["work/prefill_tokens"] + r["work/update_tokens"] for r in rows))


def values_at(run: dict[str, Any], amount: float, unit: str = "cpu_seconds") -> np.ndarray:
    """Return the value of each held-out example, (n,), after some processor seconds, tokens or
    samples, between two evaluations; the last ones if the run took less."""
    curve = [[int(step), np.array([*map(int, right)])] for step, right in run["right"].items()]
    return np.asarray(value_at({"cpu_seconds": run[unit], "held_out": curve}, amount))


def find_interval(changes: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of changes, (n,) for each seed, where seeds
    and examples are drawn anew: it includes the choice of both."""
    values, rng = np.array(changes), np.random.default_rng(0)
    seeds, count = values.shape
    means = [
        values[rng.integers(0, seeds, seeds)][:, rng.integers(0, count, count)].mean()
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def format_table(
    runs: list[dict[str, Any]],
    worlds: Iterable[str] = tuple(WORLDS),
    methods: Iterable[str] = tuple(METHODS),
) -> str:
    rows = [
        f"Start in {run['world']}: {100 * run['whole']:.1f} % of whole images, "
        f"{100 * run['crop']:.1f} % of crops\n"
        for run in runs
        if run["method"] == "start"
    ]
    rows += [
        "| world | method | held-out after, by seed | time, tokens | change from grpo at equal "
        "time | at equal tokens | at equal samples |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = {(run["world"], run["method"], run["seed"]): run for run in drop_starts(runs)}
    for name, method in itertools.product(worlds, methods):
        plain = "grpo" + (LONGER if method.endswith(LONGER) else "")
        pairs = [
            (run, found[name, plain, seed])
            for (world, known, seed), run in sorted(found.items())
            if (world, known) == (name, method) and (name, plain, seed) in found
        ]
        if pairs:
            rows.append(f"| {name} | {method} | {_describe(pairs)} |")
    return "\n".join(rows)


def drop_starts(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if run["method"] != "start"]


def _describe(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ends = [100 * values_at(run, run["cpu_seconds"]).mean() for run, _ in pairs]
    start = statistics.fmean(100 * values_at(run, 0).mean() for run, _ in pairs)
    listed = f"{start:.1f} → {', '.join(f'{end:.1f}' for end in ends)}"
    seconds, tokens = (statistics.fmean(run[unit] for run, _ in pairs) for unit in UNITS[:2])
    taken = f"{listed} | {seconds:.0f} s, {tokens / 1000:.0f} k"
    if all(run is plain for run, plain in pairs):
        return f"{taken} | – | – | –"
    return f"{taken} | {' | '.join(_compare(pairs, unit) for unit in UNITS)}"


def _compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]], unit: str) -> str:
    """Format the change from runs with the same seeds, after as much as the one with less took."""
    amounts = [min(run[unit], plain[unit]) for run, plain in pairs]
    changes = [
        100 * (values_at(run, amount, unit) - values_at(plain, amount, unit))
        for (run, plain), amount in zip(pairs, amounts, strict=True)
    ]
    low, high = find_interval(changes)
    return f"{np.mean(changes):+.1f} [{low:+.1f}, {high:+.1f}]"


def plot(runs: list[dict[str, Any]]) -> None:
    """Plot the held-out accuracy over the processor seconds, a panel for each world."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "vlm-grpo", "font.size": 9, "axes.grid": True})
    runs = drop_starts(runs)
    figure, axes = plt.subplots(1, len(WORLDS), figsize=(4.4 * len(WORLDS), 4.4), sharey=True)
    for axis, name in zip(axes, WORLDS, strict=True):
        for method in (known for known in METHODS if known + LONGER not in METHODS):
            known = [run for run in runs if (run["world"], run["method"]) == (name, method)]
            if not known:
                continue
            end = statistics.fmean(run["cpu_seconds"] for run in known)
            curves = [
                [100 * np.mean([*map(int, right)]) for right in run["right"].values()]
                for run in known
            ]
            seconds = np.linspace(0, end, len(curves[0]))
            (line,) = axis.plot(seconds, np.mean(curves, axis=0), label=method)
            low, high = np.min(curves, axis=0), np.max(curves, axis=0)
            axis.fill_between(seconds, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        axis.set_title(f"tiny {name}")
        axis.set_xlabel("processor seconds of the steps")
    axes[0].set_ylabel("held-out accuracy in percent\n(band: lowest to highest seed)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.19, 1, 1))
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), help="none: print the table")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/rare_success"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, name, method in itertools.product(options.seeds, options.worlds, options.methods):
        known = {(run["world"], run["method"], run.get("seed")) for run in load_runs(RESULTS)}
        if (name, method, seed) not in known:
            run = measure(name, method, seed, options.folder)
            print(name, method, seed, run["cpu_seconds"], "s", file=sys.stderr)
            save_runs(RESULTS, [*load_runs(RESULTS), run])
    runs = load_runs(RESULTS)
    print(format_table(runs))
    if drop_starts(runs):
        plot(runs)


if __name__ == "__main__":
    main()
