"""Held-out accuracy of GRPO's variants from a model that has seen the parts of the questions.

    OMP_NUM_THREADS=1 python perf/seen_parts.py

makes a model by supervised steps that locates a shape by its color and kind, counts a kind, names
colors and kinds, and has seen a few questions of the two worlds. Then it trains this model with
every method and seed, and prints the table of docs/study.md. Runs in `results/seen_parts.json` are
not made again: after an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from rare_success import describe_run, format_table
from saved_runs import load_runs, save_runs
from study import METHODS as KNOWN
from study import SHORT, draw_rows, export_steps, time_steps

from vlm_grpo.config.recipes import load_settings

RESULTS = Path(__file__).with_name("results") / "seen_parts.json"
PARTS = {
    "scattered": "task: grounding, weight: 2",
    "cluttered": "task: counting, weight: 1",
    "choices:easy": "task: choice, task_options: {instruction: null}, weight: 1",
}
WORLDS = {"attributes": "counting", "relations": "grounding"}
"""The worlds, at the level easy, and the recipe of each."""
SHARES = {"attributes": 0.3, "relations": 0.5}
"""The weights of the worlds' own questions in the supervised steps, beside 4 of their parts."""
MODEL_STEP, TEACHER_STEP = 300, 600
"""Steps of the supervised run: the model to train and the teacher."""
METHODS = [name for name in KNOWN if name not in ("curriculum", "replay", "trl")]
CHANGES = ["data.eval_limit=200", "evaluation.every=20"]


def prepare_models(folder: Path) -> tuple[str, str]:
    """Return the model that is trained and the teacher, and make them if they are missing."""
    found = [folder / f"parts-{step}" for step in (MODEL_STEP, TEACHER_STEP)]
    own = {f"{w}:easy": f"task: {WORLDS[w]}, weight: {share}" for w, share in SHARES.items()}
    sources = ", ".join(
        f"{{source: 'embedded:{name}', name: {name.partition(':')[0]}, {rest}}}"
        for name, rest in {**PARTS, **own}.items()
    )
    held_out = ", ".join(f"{{source: 'embedded:{name}:easy', name: {name}}}" for name in WORLDS)
    settings = load_settings(
        "worlds",
        [
            *("name=supervised-parts", f"output_dir={folder}", f"optim.max_steps={TEACHER_STEP}"),
            *(f"data.train=[{sources}]", f"data.eval=[{held_out}]", "warm_start.warmup_steps=30"),
            *("data.eval_limit=200", "checkpoint.every=300", "checkpoint.keep_last=0"),
        ],
    )
    export_steps(settings, dict(zip(found, (MODEL_STEP, TEACHER_STEP), strict=True)))
    return str(found[0]), str(found[1])


def measure(world: str, method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return what it took and the held-out examples' values at each evaluation."""
    model, teacher = prepare_models(folder)
    source = f"embedded:{world}:easy"
    changes = [*SHORT, *CHANGES, f"data.eval={source}", *KNOWN[method]]
    own = [f"name={world}-{method.replace(' ', '-')}-{seed}", f"output_dir={folder}"]
    own += [f"model={model}", f"seed={seed}"]
    settings = load_settings(
        WORLDS[world],
        [*(change.format(teacher=teacher) for change in changes), *own],
        data={"train": "python"},
    )
    seconds = time_steps(settings, draw_rows(source))
    run = {"world": world, "method": method, "seed": seed, "settings": changes}
    return run | describe_run(settings, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), help="none: print the table")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seen_parts"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, world, method in itertools.product(options.seeds, options.worlds, options.methods):
        known = {(run["world"], run["method"], run["seed"]) for run in load_runs(RESULTS)}
        if (world, method, seed) not in known:
            run = measure(world, method, seed, options.folder)
            print(world, method, seed, run["cpu_seconds"], "s", file=sys.stderr)
            save_runs(RESULTS, [*load_runs(RESULTS), run])
    print(format_table(load_runs(RESULTS), WORLDS, METHODS))


if __name__ == "__main__":
    main()
