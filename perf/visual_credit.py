"""Where steps of GRPO learn from in worlds with and without a shortcut, and when the alarm says so.

    OMP_NUM_THREADS=1 python perf/visual_credit.py

makes the model to train by supervised steps on a world whose shortcut says nothing, and trains it
in every world with every seed. It prints the tables of docs/study.md. Runs in
`results/visual_credit.json` are not made again: after an interruption the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from saved_runs import load_runs, save_runs
from scipy import stats

from vlm_grpo import export, train
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data_scripts.make_shapes import draw_examples
from vlm_grpo.model.families.family import ImageFeatures
from vlm_grpo.report.alarms import AlarmMonitor
from vlm_grpo.training.methods import visual_credit
from vlm_grpo.training.methods.visual_credit import cover_cells, measure_credit

RESULTS = Path(__file__).with_name("results") / "visual_credit.json"
SUPERVISED_STEPS, SUPERVISED_ROWS = 40, 2048
STEPS, EVERY, LAST = 60, 5, 20
GAP = 0.1
"""By how much further than before training held-out accuracy has fallen behind that of scenes like
those of training."""
SHARE, AREA = "in_boxes", "box_area"
GAIN = "visual_credit/gain_without_object"
WORLDS = {
    f"{level}, {share}": f"choices:{level},options=4,mark={share},held_out=false"
    for level, share in (
        *(("easy", 1), ("easy", 0), ("easy", 0.9), ("easy", 0.5), ("medium", 0), ("medium", 1)),
    )
}
"""The worlds, named by level and share of the training scenes with the shortcut."""
SHORT = [
    "data.eval_limit=400", f"optim.max_steps={STEPS}",
    "optim.prompts_per_step=16", "optim.lr=1e-4", "optim.schedule=constant_with_warmup",
    "optim.warmup_steps=5", "warm_start=null",
    "methods=[{file: visual_credit, options: {hide_object: true}}]",
    "logging.samples_every=0", "logging.trackers=[]",
]  # fmt: skip


def prepare_model(folder: Path) -> str:
    path = folder / "choices"
    if not path.is_dir():
        settings = load_settings(
            "choice",
            [
                *("name=supervised", f"output_dir={folder}", "seed=0", "resume=true"),
                *(f"data.{part}=embedded:{WORLDS['easy, 0']}" for part in ("train", "eval")),
                *("data.eval_limit=150", "evaluation.every=20", "warm_start.steps=all"),
                f"optim.max_steps={SUPERVISED_STEPS}",
                f"data.train_limit={SUPERVISED_ROWS}",
            ],
        )
        train(settings)
        export(settings.run_dir, path)
    return str(path)


def multiply(features: ImageFeatures) -> np.ndarray:
    """Return how much each token's features raise the objective, to first order, at least 0."""
    total = np.zeros(len(features.embeds))
    for tensor in (features.embeds, *features.deepstack):
        if tensor.grad is not None:
            total -= (tensor.grad.double() * tensor.detach().double()).sum(-1).cpu().numpy()
    return np.maximum(total, 0.0)


DEFINITIONS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "norm": (measure_credit, cover_cells),
    "norm, whole tokens": (measure_credit, lambda *given: np.ceil(cover_cells(*given))),
    "squared norm": (lambda features: measure_credit(features) ** 2, cover_cells),
    "signed": (multiply, cover_cells),
}
"""How the credit of a token and the tokens of a box are found; the first is the library's."""


@contextmanager
def watch_all() -> Iterator[None]:
    """Add the shares by every definition to the metrics of the steps inside."""
    method = visual_credit.VisualCredit
    read, library = method.read_features, next(iter(DEFINITIONS.values()))

    def read_all(self: Any, updates: Any) -> dict[str, float]:
        found = dict[str, float]()
        for name, definition in reversed(DEFINITIONS.items()):  # the maps of the first stay
            visual_credit.measure_credit, visual_credit.cover_cells = definition
            try:
                own = read(self, updates)
            finally:
                visual_credit.measure_credit, visual_credit.cover_cells = library
            shares = {key: own.get(f"visual_credit/{key}") for key in (SHARE, AREA)}
            found |= own | {f"{name}: {k}": v for k, v in shares.items() if v is not None}
        maps = [own / own.sum() for own in self.maps.values() if own.any()]
        cells = np.mean(maps, 0).flat if maps else ()
        return found | {f"cell {number}": float(share) for number, share in enumerate(cells)}

    method.read_features = read_all
    try:
        yield
    finally:
        method.read_features = read


def measure(world: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the curves of both evaluations, the shares of each step and the alarms."""
    like, held_out = WORLDS[world], WORLDS[f"{world.partition(',')[0]}, 0"]
    sources = [f"{{source: 'embedded:{like}', name: like}}"]
    sources += [f"{{source: 'embedded:{held_out}', name: held_out}}"]
    name = re.sub(r"[^\w.]+", "-", f"{world}-{seed}")
    own = [f"name={name}", f"output_dir={folder}", f"model={prepare_model(folder)}"]
    changes = [*SHORT, f"data.eval=[{', '.join(sources)}]", f"evaluation.every={EVERY}"]
    own.append("resume=true")
    settings = load_settings("choice", [*changes, *own, f"seed={seed}"], data={"train": "python"})
    rows = draw_examples(like, SUPERVISED_ROWS + 1024)[SUPERVISED_ROWS:]
    with watch_all():
        train(settings, data=rows)
    metrics = [*map(json.loads, (settings.run_dir / "metrics.jsonl").open())]
    curves: dict[str, list[list[float]]] = {"like": [], "held_out": []}
    for path in sorted((settings.run_dir / "evaluation").glob("step-*.jsonl")):
        answers = [*map(json.loads, path.open())]
        for part, curve in curves.items():
            right = [row["rewards"][f"{part}/exact"] for row in answers if row["source"] == part]
            step = int(path.stem.partition("-")[2])
            curve.append([step, round(statistics.fmean(right), 4)])
    return {
        "world": world,
        "seed": seed,
        "settings": changes,
        "rewards": [round(row["reward"], 4) for row in metrics],
        "shares": [
            {
                key: round(row[key], 4)
                for key in row
                if key.startswith((*DEFINITIONS, "cell ", GAIN))
            }
            for row in metrics
        ],
        **curves,
    }


def find_alarm(run: dict[str, Any]) -> int | None:
    """Return the step in which the alarm ``shortcut`` is raised first."""
    monitor = AlarmMonitor({"exact": 1.0}, "exact", completions=128)
    for step, (reward, shares) in enumerate(zip(run["rewards"], run["shares"], strict=True)):
        row = {key: shares[key] for key in (GAIN,) if key in shares}
        if any(alarm["name"] == "shortcut" for alarm in monitor.update(row | {"reward": reward})):
            return step
    return None


def find_gap(run: dict[str, Any], at_first: bool) -> int | None:
    """Return the first evaluated step where the held-out accuracy is behind by ``GAP``, perhaps
    besides what it was behind at first."""
    gaps = [(step, a - b) for (step, a), (_, b) in zip(run["like"], run["held_out"], strict=True)]
    least = GAP + gaps[0][1] * at_first
    return next((step for step, gap in gaps if gap >= least - 1e-9), None)


def find_share(
    run: dict[str, Any], name: str, is_relative: bool = False, last: int = LAST
) -> float:
    """Return the mean share inside the boxes over the last steps with one, or over the first if
    ``last`` is negative; perhaps relative to the boxes' share of the image."""
    part = run["shares"][-last:] if last > 0 else run["shares"][:-last]
    steps = [step for step in part if f"{name}: {SHARE}" in step]
    share, area = (statistics.fmean(s[f"{name}: {key}"] for s in steps) for key in (SHARE, AREA))
    return share / area if is_relative else share


def correlate(runs: Sequence[dict[str, Any]], shares: Sequence[float]) -> str:
    """Format Spearman's and Pearson's correlation of shares with held-out accuracy over the runs,
    with 95 % intervals over worlds that are drawn with replacement."""
    accuracies = [run["held_out"][-1][1] for run in runs]
    places = [[i for i, run in enumerate(runs) if run["world"] == name] for name in WORLDS]
    places = [own for own in places if own]
    rng, texts = np.random.default_rng(0), list[str]()
    drawn = [
        np.concatenate([places[n] for n in rng.integers(0, len(places), len(places))])
        for _ in range(2000)
    ]
    x, y = np.array(shares), np.array(accuracies)
    for correlation in (stats.spearmanr, stats.pearsonr):
        found = [
            correlation(x[own], y[own])[0] for own in drawn if np.ptp(x[own]) and np.ptp(y[own])
        ]
        low, high = np.quantile(found, (0.025, 0.975))
        texts.append(f"{correlation(x, y)[0]:+.2f} [{low:+.2f}, {high:+.2f}]")
    return " | ".join(texts)


def print_tables(runs: Sequence[dict[str, Any]]) -> None:
    columns = ("world", "held out, by seed", "like training", "share in boxes")
    columns += ("alarm", "10 points further behind", "10 points behind")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name in WORLDS:
        own = sorted((run for run in runs if run["world"] == name), key=lambda run: run["seed"])
        if not own:
            continue
        start = 100 * statistics.fmean(run["held_out"][0][1] for run in own)
        held, like = (
            ", ".join(f"{100 * run[part][-1][1]:.1f}" for run in own)
            for part in ("held_out", "like")
        )
        first, last = (
            statistics.fmean(100 * find_share(run, "norm", last=n) for run in own)
            for n in (-LAST, LAST)
        )
        steps = [(find_alarm(run), find_gap(run, True), find_gap(run, False)) for run in own]
        cells = (
            ", ".join("–" if s is None else str(s) for s in found)
            for found in zip(*steps, strict=True)
        )
        print(
            f"| {name} | {start:.1f} → {held} | {like} | {first:.1f} → {last:.1f} % | "
            f"{' | '.join(cells)} |"
        )
    print("\n| definition | Spearman | Pearson |\n| --- | --- | --- |")
    for name, is_relative in itertools.product(DEFINITIONS, (False, True)):
        label = f"{name}, over the area" if is_relative else name
        shares = [find_share(run, name, is_relative) for run in runs]
        print(f"| {label} | {correlate(runs, shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), help="none: print the tables")
    parser.add_argument("--seeds", nargs="+", type=int, default=[5, 6, 7, 8, 9])
    parser.add_argument("--folder", type=Path, default=Path("runs/visual_credit"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, world in itertools.product(options.seeds, options.worlds):
        if (world, seed) not in {(run["world"], run["seed"]) for run in load_runs(RESULTS)}:
            run = measure(world, seed, options.folder)
            print(world, seed, run["like"][-1], run["held_out"][-1], file=sys.stderr)
            save_runs(RESULTS, [*load_runs(RESULTS), run])
    print_tables(load_runs(RESULTS))


if __name__ == "__main__":
    main()
