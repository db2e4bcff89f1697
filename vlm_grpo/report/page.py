"""The page itself: everything in one file, which a browser opens from disk."""

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
from vlm_grpo.drawing import GOLD_COLOR, PREDICTED_COLOR
from vlm_grpo.report.charts import draw
from vlm_grpo.report.entries import KINDS, as_json, visible
from vlm_grpo.report.gallery import GALLERY_BYTES, Gallery, gallery
from vlm_grpo.report.panels import charts, comparison
from vlm_grpo.report.run import Change, Run, is_number, read_run
from vlm_grpo.utils.atomic_io import write_atomic

SCRIPTS = ("base.js", "charts.js", "gallery.js")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page, and what it is."""

    label: str
    value: str
    note: str = ""


def build_report(run_dir: Path, limit: int = GALLERY_BYTES) -> Path:
    """Write ``report.html`` into a run's folder, whole or not at all.

    Args:
        run_dir: the run's folder; the run may be going on.
        limit: bytes that the gallery may take.

    Raises:
        UserError: there is no run in the folder.
    """
    run = read_run(run_dir)
    values = {
        "title": f"{run.name} · {run.task}",
        "heads": [_head("", run)],
        "charts": [draw(chart) for chart in charts(run)],
        "differences": [],
        "settings": visible(run.config_text, 50_000),
    }
    return _write(run_dir / "report.html", values, [run], gallery([("", run)], limit))


def compare_runs(a: Path, b: Path, limit: int = GALLERY_BYTES) -> Path:
    """Write a page that sets two runs side by side, beside the first run's folder.

    Args:
        a, b: the runs' folders.
        limit: bytes that the gallery may take.

    Raises:
        UserError: there is no run in one of the folders.
    """
    runs = [read_run(a), read_run(b)]
    names = [run.name for run in runs]
    if names[0] == names[1]:
        names = [str(folder) for folder in (a, b)]
    labelled = list(zip(names, runs, strict=True))
    values = {
        "title": f"{names[0]} and {names[1]}",
        "heads": [_head(name, run) for name, run in labelled],
        "charts": [draw(chart) for chart in comparison(labelled)],
        "differences": _differences(runs),
        "settings": "",
    }
    path = a.resolve().parent / f"compare-{runs[0].name}-{runs[1].name}.html"
    return _write(path, values, runs, gallery(labelled, limit))


def _write(path: Path, values: Mapping[str, Any], runs: Sequence[Run], shown: Gallery) -> Path:
    files = resources.files("vlm_grpo.report")
    script = "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    environment = Environment(
        loader=PackageLoader("vlm_grpo.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    data = {
        "entries": shown.entries,
        "pictures": shown.pictures,
        "kinds": KINDS,
        "comparing": len(runs) > 1,
    }
    html = environment.get_template("page.html.j2").render(
        **values,
        alarms=[_alarm(row, run) for run in runs for row in run.alarms],
        comparing=len(runs) > 1,
        unreadable=sum(run.unreadable for run in runs) + shown.skipped,
        left_out=shown.left_out,
        entries=len(shown.entries),
        gold_color=GOLD_COLOR,
        predicted_color=PREDICTED_COLOR,
        # Only this very script may run, and nothing may be loaded, whatever a model wrote.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        script=Markup(script),
        style=Markup(files.joinpath("page.css").read_text("utf-8")),
        data=Markup(as_json(data)),
        as_json=lambda value: Markup(as_json(value)),
        markup=Markup,
    )
    # A folder's name may hold what is no character.
    write_atomic(path, html.encode("utf-8", errors="replace"))
    return path


def _head(label: str, run: Run) -> dict[str, Any]:
    """What the top of the page says of a run."""
    steps, of = run.steps_done, run.max_steps
    change = run.change()
    state = f"{steps} steps" if of is None or steps >= of else f"step {steps} of {of}, not finished"
    return {
        "label": label,
        "task": Path(run.task).stem,
        "model": run.model,
        "state": state,
        "primary_metric": (run.primary_metric or "").replace("_", " "),
        "change": change,
        "verdict": _verdict(change),
        "worse": change is not None and change.worse,
        "intervals": change is not None and not math.isnan(change.before_interval[0]),
        "shares": change is not None and _shares(change),
        "tiles": _tiles(run),
    }


def _shares(change: Change) -> bool:
    """Whether both values lie on a scale from nothing to all."""
    return not change.lower_is_better and 0 <= change.before <= 1 and 0 <= change.after <= 1


def _verdict(change: Change | None) -> str:
    """The change in words, "" where none was measured; the interval is of the paired difference."""
    if change is None:
        return ""
    low, high = change.difference_interval
    if math.isnan(low):
        return ""
    if low <= 0.0 <= high:
        return "no clear change, for 0 is within it"
    return "clearly better" if (low > 0.0) != change.lower_is_better else "clearly worse"


def _tiles(run: Run) -> list[Tile]:
    """Numbers of the last steps beside those of the first."""
    tiles = []
    for name, label, form in (
        ("reward", "reward", "{:.3g}"),
        ("completions/mean_length", "tokens a completion", "{:.3g}"),
        ("frac_reward_zero_std", "groups without a spread", "{:.0%}"),
        ("entropy", "entropy", "{:.3g} nats"),
        ("time/step", "time of a step", "{:.3g} s"),
    ):
        values = [row[name] for row in run.metrics if is_number(row.get(name))]
        if values:
            some = max(1, min(10, len(values) // 4))
            first, last = sum(values[:some]) / some, sum(values[-some:]) / some
            note = f"at first {form.format(first)}" if len(values) > 1 else ""
            tiles.append(Tile(label, form.format(last), note))
    return tiles


def _alarm(row: Mapping[str, Any], run: Run) -> dict[str, str]:
    words = {name: visible(str(row.get(name, "")), 2_000) for name in ("name", "message", "remedy")}
    return {**words, "step": visible(str(row.get("step", "")), 20), "run": run.name}


def _differences(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Settings that differ: dotted key, and the value in each of two runs."""
    first, second = (
        {key: str(value) for key, value in flatten(run.config).items()} for run in runs
    )
    return [
        (visible(key, 200), visible(first.get(key, "–"), 300), visible(second.get(key, "–"), 300))
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    ]


def figure(value: float, error: bool = False) -> str:
    """A share of 1 as a percentage; an error, or another number, as it is."""
    if error:
        return f"{value:.3f}"
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if -1.0 <= value <= 1.0 else f"{value:.3g}"
