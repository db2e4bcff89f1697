"""Charts of a sweep: runs that differ in the value of a setting."""

import math
from collections.abc import Iterator, Mapping, Sequence

from vlm_grpo.config.section import flatten
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.report.charts import Chart, Line
from vlm_grpo.report.gallery import display_text
from vlm_grpo.report.run import Run

IDENTITY = ("name", "output_dir", "resume")  # settings that differ between any two runs
NOT_SWEPT = (*IDENTITY, "seed")
"""Settings that are not plotted unless asked for: seeds repeat a run."""
MAX_AUTOMATIC = 3  # most differing settings that are plotted without being asked for
LOGARITHMIC_RATIO = 8.0  # smallest ratio of the largest to the smallest value on a logarithmic axis


def list_differences(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ, by key, with their text in each run; "–": it is missing."""
    settings = [_flatten(run) for run in runs]
    found = {
        display_text(key, 200): tuple(values.get(key, "–") for values in settings)
        for key in sorted({key for values in settings for key in values})
    }
    return {key: texts for key, texts in found.items() if len(set(texts)) > 1}


def choose_swept(runs: Sequence[Run], requested: Sequence[str] = ()) -> list[str]:
    """Return the settings to plot: the requested ones, or those in which three or more runs differ.

    If these are many, there is no telling which one matters, and none is chosen."""
    differing = list_differences(runs)
    for key in requested:
        if key not in differing:
            known = [name for name in differing if name not in IDENTITY]
            raise UserError(
                f"--sweep {key}: this setting does not differ between the runs"
                f"{nearest(key, known)}; these do: {', '.join(known) or 'none'}"
            )
    if requested:
        return list(requested)
    swept = [key for key in differing if key not in NOT_SWEPT and not key.startswith("logging")]
    return swept if len(runs) > 2 and len(swept) <= MAX_AUTOMATIC else []


def build_sweep_charts(
    runs: Sequence[tuple[str, Run]], swept: Sequence[str], together: bool
) -> Iterator[Chart]:
    """Yield the primary metric at each run's last evaluation against each of the swept settings, or
    ``together`` against the first one, with a line per value of the second."""
    known = [(label, run) for label, run in runs if not math.isnan(_get_result(run))]
    primary_metrics = {run.primary_metric for _, run in known}
    if len(known) < 2 or len(primary_metrics) > 1:
        return
    for key in swept[:1] if together else swept:
        yield _build_chart(known, key, swept[1] if together and len(swept) > 1 else None)


def _get_result(run: Run) -> float:
    metrics = run.evaluations[-1].metrics if run.evaluations else {}
    return metrics.get(run.primary_metric or "", math.nan)


def _build_chart(runs: Sequence[tuple[str, Run]], key: str, split: str | None) -> Chart:
    texts = {label: _flatten(run).get(key, "–") for label, run in runs}
    numbers = {text: number for text in texts.values() if (number := _parse(text)) is not None}
    categories = None if len(numbers) == len(set(texts.values())) else sorted(set(texts.values()))
    places = numbers if categories is None else {text: i for i, text in enumerate(categories)}
    lines: dict[str, list[tuple[float, str, Run]]] = {}
    for label, run in runs:
        name = f"{split} = {_flatten(run).get(split, '–')}" if split else "run"
        lines.setdefault(name, []).append((places[texts[label]], label, run))
    values, metric = list(places.values()), str(runs[0][1].primary_metric)
    last = runs[0][1].evaluations[-1]
    is_share = not last.lower_is_better and all(0 <= _get_result(run) <= 1 for _, run in runs)
    return Chart(
        f"{display_text(metric, 60).replace('_', ' ')} by {display_text(key, 60)}",
        f"{'Lower is better. ' if last.lower_is_better else ''}One dot per run, at its last "
        "held-out evaluation, with its 95 % interval; the line joins the means of equal values.",
        [_build_line(name, points, metric) for name, points in lines.items()],
        share=is_share,
        measured=True,
        axis=key,
        logarithmic_x=categories is None
        and min(values) > 0
        and max(values) >= LOGARITHMIC_RATIO * min(values),
        ticks=None if categories is None else [display_text(text, 30) for text in categories],
    )


def _build_line(name: str, points: Sequence[tuple[float, str, Run]], metric: str) -> Line:
    points = sorted(points, key=lambda point: point[:2])
    intervals = [run.evaluations[-1].get_interval(metric) for _, _, run in points]
    return Line(
        display_text(name, 90),
        [x for x, _, _ in points],
        [_get_result(run) for _, _, run in points],
        [low for low, _ in intervals],
        [high for _, high in intervals],
        labels=[label for _, label, _ in points],
    )


def _flatten(run: Run) -> Mapping[str, str]:
    return {key: display_text(str(value), 300) for key, value in flatten(run.config).items()}


def _parse(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
