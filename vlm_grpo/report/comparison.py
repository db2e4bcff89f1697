"""Compare runs: pairwise on the same held-out examples, and by the settings that differ."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vlm_grpo.config.section import flatten
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.eval.statistics import PairedTest, adjust_p_values, bootstrap_interval, compare_pairs
from vlm_grpo.report.charts import Chart, Line
from vlm_grpo.report.gallery import display_text
from vlm_grpo.report.run import Run

FEW_PAIRS = 3  # with more pairs of runs, only the primary metric is tested
FLIPS_SHOWN = (200, 30)
"""Most flipped examples in each direction for few pairs of runs, and for many."""
OUTPUT_CHARACTERS = 600  # longest output of a flipped example

Pair = dict[str, Any]
"""The comparison of run B with run A, as ``comparison.js`` reads it.

Keys: ``a`` and ``b`` (numbers of the runs), ``steps`` (of their last evaluations), ``n`` (examples
in common), ``onlyA`` and ``onlyB`` (numbers of examples), ``changed`` (number of ids that stand for
different examples in A and B, which are left out), ``primary`` (the primary metric's name),
``tests`` (one per metric: ``name``, ``share``, ``lowerIsBetter``, ``adjusted`` and the fields of
``PairedTest``), ``better`` and ``worse`` (numbers of examples, by the first test's metric), and
``flips`` (for that metric: ``id``, ``a``, ``b``, ``better``, and ``outputs``, of A and of B).
"""


def build_pairs(runs: Sequence[tuple[str, Run]]) -> list[Pair]:
    """Return the comparison of every two runs that have a held-out evaluation, B with A.

    The p-values of the primary metric are adjusted for the number of pairs by Holm's method.
    """
    evaluated = [number for number, (_, run) in enumerate(runs) if run.evaluations]
    combinations = list(itertools.combinations(evaluated, 2))
    few = len(combinations) <= FEW_PAIRS
    pairs = [{"a": a, "b": b, **_compare(runs[a][1], runs[b][1], few)} for a, b in combinations]
    primary = [pair["tests"][0] for pair in pairs if pair["tests"]]
    adjusted = adjust_p_values([test["p_value"] for test in primary])
    for test, p_value in zip(primary, adjusted, strict=True):
        test["adjusted"] = p_value
    return pairs


def _compare(run_a: Run, run_b: Run, few: bool) -> Pair:
    first, second = run_a.evaluations[-1], run_b.evaluations[-1]
    outputs = [{row["id"]: row["output"] for row in table.rows} for table in (first, second)]
    ids_a, ids_b = (own.keys() for own in outputs)
    changed = _find_changed(run_a, run_b)
    pairs = {name: second.pair(first, name, changed) for name in second.names}
    names = [name for name, parts in pairs.items() if parts and all(parts)]
    names.sort(key=lambda name: (name != run_b.primary_metric, name))
    tests, flips = [], []
    for name in names if few else names[:1]:
        both = {i: values for part in pairs[name] for i, values in part.items()}
        lower_is_better = second.is_error(name)
        if not tests:
            flips = [
                {"id": i, "a": a, "b": b, "better": (b > a) != lower_is_better}
                for i, (a, b) in both.items()
                if a != b
            ]
        test = _test_parts([[*part.values()] for part in pairs[name]], first.seed)
        tests.append(
            {
                **asdict(test),
                "name": display_text(name, 60),
                "share": all(0 <= value <= 1 for pair in both.values() for value in pair),
                "lowerIsBetter": lower_is_better,
                "adjusted": test.p_value,
            }
        )
    flips.sort(key=lambda flip: -abs(flip["b"] - flip["a"]))
    better, worse = ([flip for flip in flips if flip["better"] == way] for way in (True, False))
    limit = FLIPS_SHOWN[0 if few else 1]
    return {
        "steps": [first.step, second.step],
        "n": len((ids_a & ids_b) - changed),
        "onlyA": len(ids_a - ids_b),
        "onlyB": len(ids_b - ids_a),
        "changed": len(changed),
        "primary": display_text(run_b.primary_metric or "", 60),
        "tests": tests,
        "better": len(better),
        "worse": len(worse),
        "flips": [
            {
                **flip,
                "id": display_text(flip["id"], 200),
                "outputs": [display_text(own[flip["id"]], OUTPUT_CHARACTERS) for own in outputs],
            }
            for flip in (*better[:limit], *worse[:limit])
        ],
    }


def _test_parts(parts: Sequence[Sequence[tuple[float, float]]], seed: int) -> PairedTest:
    """Test pairs of values; of several parts, the means of which count equally."""
    shares = [sum(map(len, parts)) / len(parts) / len(part) for part in parts]
    weighted = zip(shares, parts, strict=True)
    a, b = zip(*((share * x, share * y) for share, part in weighted for x, y in part), strict=True)
    test = compare_pairs(a, b, seed)
    if len(parts) == 1:
        return test
    interval = bootstrap_interval(*([y - x for x, y in part] for part in parts), seed=seed)
    return replace(test, interval=interval)


def _find_changed(run_a: Run, run_b: Run) -> set[str]:
    """Return the ids whose question or gold answer differs between the samples of the runs."""
    seen_a, seen_b = (
        {
            str(row.get("id")): repr((row.get("question"), row.get("gold")))  # NaN equals itself
            for row in run.samples
            if row["source"].startswith("held-out-")
        }
        for run in (run_a, run_b)
    )
    return {id_ for id_, example in seen_a.items() if seen_b.get(id_, example) != example}


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
