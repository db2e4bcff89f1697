"""Render the report: one self-contained HTML file, which a browser opens from disk."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vlm_grpo.config.base import flatten
from vlm_grpo.config.sources import get_short_name
from vlm_grpo.drawing import GOLD_COLOR, PREDICTED_COLOR
from vlm_grpo.report.charts import draw_chart
from vlm_grpo.report.entries import KINDS, display_text, to_script_json
from vlm_grpo.report.gallery import GALLERY_BYTES, Gallery, build_gallery
from vlm_grpo.report.panels import build_charts, build_comparison_charts
from vlm_grpo.report.run import Change, Run, is_number, read_run
from vlm_grpo.utils.atomic_io import write_atomic

SCRIPTS = ("base.js", "charts.js", "gallery.js")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page, with its label and a note."""

    label: str
    value: str
    note: str = ""


def build_report(run_dir: Path, limit: int = GALLERY_BYTES) -> Path:
    """Write ``report.html`` into a run's folder, atomically.

    Args:
        run_dir: the run's folder; the run may be unfinished.
        limit: most bytes of the gallery.

    Raises:
        UserError: the folder is not that of a run.
    """
    run = read_run(run_dir)
    values = {
        "title": f"{run.name} · {run.task}",
        "summaries": [_summarize_run("", run)],
        "charts": [draw_chart(chart) for chart in build_charts(run)],
        "differences": [],
        "settings": display_text(run.config_text, 50_000),
    }
    return _write(run_dir / "report.html", values, [run], build_gallery([("", run)], limit))


def compare_runs(a: Path, b: Path, limit: int = GALLERY_BYTES) -> Path:
    """Write a page that compares two runs, next to the first run's folder.

    Args:
        a, b: the runs' folders.
        limit: most bytes of the gallery.

    Raises:
        UserError: one of the folders is not that of a run.
    """
    runs = [read_run(a), read_run(b)]
    names = [run.name for run in runs]
    if names[0] == names[1]:
        names = [str(folder) for folder in (a, b)]
    labeled = list(zip(names, runs, strict=True))
    values = {
        "title": f"{names[0]} and {names[1]}",
        "summaries": [_summarize_run(name, run) for name, run in labeled],
        "charts": [draw_chart(chart) for chart in build_comparison_charts(labeled)],
        "differences": _compare_settings(runs),
        "settings": "",
    }
    path = a.resolve().parent / f"compare-{runs[0].name}-{runs[1].name}.html"
    return _write(path, values, runs, build_gallery(labeled, limit))


def _write(path: Path, values: Mapping[str, Any], runs: Sequence[Run], gallery: Gallery) -> Path:
    files = resources.files("vlm_grpo.report")
    script = "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    environment = Environment(
        loader=PackageLoader("vlm_grpo.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["format_value"] = format_value
    data = {
        "entries": gallery.entries,
        "pictures": gallery.pictures,
        "kinds": KINDS,
        "comparing": len(runs) > 1,
    }
    html = environment.get_template("page.html.j2").render(
        **values,
        alarms=[_escape_alarm(row, run) for run in runs for row in run.alarms],
        comparing=len(runs) > 1,
        unreadable=sum(run.unreadable for run in runs) + gallery.skipped,
        omitted=gallery.omitted,
        entries=len(gallery.entries),
        gold_color=GOLD_COLOR,
        predicted_color=PREDICTED_COLOR,
        # Only this script may run, and nothing may be loaded, whatever a model wrote.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        script=Markup(script),
        style=Markup(files.joinpath("page.css").read_text("utf-8")),
        data=Markup(to_script_json(data)),
        to_script_json=lambda value: Markup(to_script_json(value)),
        markup=Markup,
    )
    # A folder's name may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomic(path, html.encode("utf-8", errors="replace"))
    return path


def _summarize_run(label: str, run: Run) -> dict[str, Any]:
    """Return the values at the top of the page."""
    steps, total = run.steps_done, run.max_steps
    change = run.change()
    finished = total is None or steps >= total
    return {
        "label": label,
        "task": get_short_name(run.task),
        "model": run.model,
        "state": f"{steps} steps" if finished else f"step {steps} of {total}, not finished",
        "primary_metric": (run.primary_metric or "").replace("_", " "),
        "change": change,
        "significance": _describe_significance(change),
        "worse": change is not None and change.worse,
        "has_intervals": change is not None and not math.isnan(change.before_interval[0]),
        "is_share": change is not None and _is_share(change),
        "tiles": _build_tiles(run),
    }


def _is_share(change: Change) -> bool:
    """Return whether both values are fractions of 1."""
    return not change.lower_is_better and 0 <= change.before <= 1 and 0 <= change.after <= 1


def _describe_significance(change: Change | None) -> str:
    """Describe the change by the interval of the paired difference; "" if there is none."""
    if change is None:
        return ""
    low, high = change.difference_interval
    if math.isnan(low):
        return ""
    if low <= 0.0 <= high:
        return "no significant change"
    better = (low > 0.0) != change.lower_is_better
    return f"significantly {'better' if better else 'worse'}"


def _build_tiles(run: Run) -> list[Tile]:
    """Return means over the last steps, with those over the first steps as notes."""
    tiles = []
    for name, label, unit in (
        ("reward", "reward", ""),
        ("completions/mean_length", "tokens per completion", ""),
        ("frac_reward_zero_std", "groups with equal rewards", "%"),
        ("entropy", "entropy", "nats"),
        ("time/step", "time per step", "s"),
    ):
        values = [row[name] for row in run.metrics if is_number(row.get(name))]
        if values:
            count = max(1, min(10, len(values) // 4))
            first, last = sum(values[:count]) / count, sum(values[-count:]) / count
            note = f"initially {_add_unit(first, unit)}" if len(values) > 1 else ""
            tiles.append(Tile(label, _add_unit(last, unit), note))
    return tiles


def _add_unit(value: float, unit: str) -> str:
    number = f"{100 * value:.0f}" if unit == "%" else f"{value:.3g}"
    return f"{number}\N{NO-BREAK SPACE}{unit}" if unit else number


def _escape_alarm(row: Mapping[str, Any], run: Run) -> dict[str, str]:
    limits = {"step": 20, "name": 2_000, "message": 2_000, "remedy": 2_000}
    texts = {key: display_text(str(row.get(key, "")), limit) for key, limit in limits.items()}
    return {**texts, "run": run.name}


def _compare_settings(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return the settings that differ: the dotted key, and its value in each of the two runs."""
    first, second = (
        {key: str(value) for key, value in flatten(run.config).items()} for run in runs
    )
    differing = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    return [
        (
            display_text(key, 200),
            display_text(first.get(key, "–"), 300),
            display_text(second.get(key, "–"), 300),
        )
        for key in differing
    ]


def format_value(value: float, is_error: bool = False) -> str:
    """Format a fraction of 1 as a percentage, and an error or another number as it is."""
    if is_error:
        return f"{value:.3f}"
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if -1.0 <= value <= 1.0 else f"{value:.3g}"
