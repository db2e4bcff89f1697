"""Render the report: one self-contained HTML file, which a browser opens from disk."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from vlm_grpo.errors import UserError
from vlm_grpo.eval.scored import is_number
from vlm_grpo.eval.statistics import format_value
from vlm_grpo.report.charts import build_charts, build_comparison_charts, pack_charts
from vlm_grpo.report.comparison import build_pairs
from vlm_grpo.report.gallery import KINDS, build_gallery, display_text, to_script_json
from vlm_grpo.report.run import Run, read_run
from vlm_grpo.report.sweep import IDENTITY, build_sweep_charts, choose_swept, list_differences
from vlm_grpo.task.drawing import GOLD_COLOR, PREDICTED_COLOR
from vlm_grpo.task.registry import get_short_name
from vlm_grpo.utils.atomic_io import write_atomic

SCRIPTS = ("base.js", "colors.js", "scales.js", "charts.js", "gallery.js", "comparison.js")
MAX_CARDS = 3  # most runs that have a card each; more are rows of a table
MAX_COLUMNS = 4  # most differing settings in that table
TILES = {
    "reward": ("reward", ""),
    "completions/mean_length": ("tokens per completion", ""),
    "frac_reward_zero_std": ("groups with equal rewards", "%"),
    "entropy": ("entropy", "nats"),
    "time/step": ("time per step", "s"),
}
"""Label and unit of the metrics that are at the top of the page."""


def build_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run's folder, atomically; the run may be unfinished.

    ``UserError``: the folder is not that of a run."""
    run = read_run(run_dir)
    return _write(run_dir / "report.html", f"{run.name} · {run.task}", [("", run)])


def compare_runs(folders: Sequence[Path], sweep: Sequence[str] = ()) -> Path:
    """Write a page that compares two or more runs, next to the first run's folder.

    ``sweep`` has the settings to plot the primary metric against: one, or two for a line per value
    of the second; none: chosen automatically if the runs differ in few settings. ``UserError``: a
    folder is not that of a run or is given twice, or a setting of the sweep is the same in all
    runs."""
    for number, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            raise UserError(f"the run {folder} is given twice: a comparison needs different runs")
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    runs = [(display_text(n, 200), read_run(f)) for n, f in zip(labels, folders, strict=True)]
    names = [run.name for _, run in runs]
    title = " and ".join(names) if len(runs) == 2 else f"{len(runs)} runs"
    joined = "-".join(names)
    if len(joined) > 100:  # a file name has at most 255 bytes
        digest = hashlib.sha256("\n".join(names).encode("utf-8", "replace")).hexdigest()[:8]
        joined = f"{len(runs)}-runs-{digest}"
    path = folders[0].resolve().parent / f"compare-{joined}.html"
    return _write(path, title, runs, sweep)


def _write(
    path: Path, title: str, runs: Sequence[tuple[str, Run]], sweep: Sequence[str] = ()
) -> Path:
    comparing, read = len(runs) > 1, [run for _, run in runs]
    charts = build_comparison_charts(runs) if comparing else build_charts(read[0])
    swept = choose_swept(read, sweep)
    sweeps = [*build_sweep_charts(runs, swept, together=bool(sweep))]
    differences, pairs = list_differences(read), build_pairs(runs)
    gallery = build_gallery(runs)
    files = resources.files("vlm_grpo.report")
    script = "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    summaries = [_summarize_run(label, run) for label, run in runs]
    data = {
        "entries": gallery.entries,
        "pictures": gallery.pictures,
        "kinds": KINDS,
        "runs": [summary["label"] for summary in summaries] if comparing else [],
        "pairs": pairs,
        **pack_charts([*sweeps, *charts]),
    }
    html = _load_template().render(
        title=title,
        charts=charts,
        sweeps=sweeps,
        differences=differences,
        pairs=pairs,
        settings="" if comparing else display_text(read[0].config_text, 50_000),
        summaries=summaries,
        few=len(runs) <= MAX_CARDS,
        tile_labels=list(dict.fromkeys(t["label"] for s in summaries for t in s["tiles"])),
        columns=[key for key in differences if key not in IDENTITY][:MAX_COLUMNS],
        alarms=[_escape_alarm(row, run) for run in read for row in run.alarms],
        comparing=comparing,
        unreadable=sum(run.unreadable for run in read) + gallery.skipped,
        omitted=gallery.omitted,
        entries=len(gallery.entries),
        gold_color=GOLD_COLOR,
        predicted_color=PREDICTED_COLOR,
        # Only this script may run, and nothing may be loaded, whatever a model wrote.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        script=Markup(script),
        style=Markup(files.joinpath("page.css").read_text("utf-8")),
        data=Markup(to_script_json(data)),
    )
    # A folder's name may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomic(path, html.encode("utf-8", errors="replace"))
    return path


@cache
def _load_template() -> Template:
    """Compile the page's template, which takes as long as to read a run and render it."""
    environment = Environment(
        loader=PackageLoader("vlm_grpo.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["format_value"] = partial(format_value, space="\N{NO-BREAK SPACE}")
    return environment.get_template("page.html.j2")


def _summarize_run(label: str, run: Run) -> dict[str, Any]:
    steps, total, change = run.steps_done, run.max_steps, run.change()
    is_done = total is None or steps >= total
    summary = {
        "label": label,
        "task": get_short_name(run.task),
        "model": run.model,
        "state": f"{steps} steps" if is_done else f"step {steps} of {total}, not finished",
        "primary_metric": (run.primary_metric or "").replace("_", " "),
        "change": change,
        "tiles": list(_build_tiles(run)),
    }
    if change is not None:
        verdict, values = change.verdict, (change.before, change.after)
        significance = f"significantly {verdict}" if verdict else "no significant change"
        is_paired = not math.isnan(change.difference_interval[0])  # they have examples in common
        summary |= {
            "verdict": verdict,
            "significance": significance if is_paired else "",
            "has_intervals": not math.isnan(change.before_interval[0]),
            "is_share": not change.lower_is_better and all(0 <= value <= 1 for value in values),
        }
    return summary


def _build_tiles(run: Run) -> Iterator[dict[str, str]]:
    for name, (label, unit) in TILES.items():
        values = [row[name] for row in run.metrics if is_number(row.get(name))]
        if values:
            count = max(1, min(10, len(values) // 4))
            first, last = sum(values[:count]) / count, sum(values[-count:]) / count
            note = f"initially {_add_unit(first, unit)}" if len(values) > 1 else ""
            yield {"label": label, "value": _add_unit(last, unit), "note": note}


def _add_unit(value: float, unit: str) -> str:
    number = f"{100 * value:.0f}" if unit == "%" else f"{value:.3g}"
    return f"{number}\N{NO-BREAK SPACE}{unit}" if unit else number


def _escape_alarm(row: Mapping[str, Any], run: Run) -> dict[str, str]:
    limits = {"step": 20, "name": 2_000, "message": 2_000, "remedy": 2_000}
    texts = {key: display_text(str(row.get(key, "")), limit) for key, limit in limits.items()}
    return {**texts, "run": run.name}
