"""Compare runs pairwise on the held-out examples that both have answered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vlm_grpo.eval.paired_test import adjust_p_values, compare_pairs
from vlm_grpo.report.entries import display_text
from vlm_grpo.report.run import HeldOutEvaluation, Run, read_outputs

FEW_PAIRS = 3
"""With more pairs of runs, only the primary metric is tested."""
FLIPS_SHOWN = (200, 30)
"""Most flipped examples in each direction for few pairs of runs, and for many."""
OUTPUT_CHARACTERS = 600
"""Longest output of a flipped example."""

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
    outputs = {n: read_outputs(runs[n][1], runs[n][1].evaluations[-1].step) for n in evaluated}
    pairs = []
    for a, b in combinations:
        pair, flips = _compare(runs[a][1], runs[b][1], few)
        shown = _shorten(flips, (outputs[a], outputs[b]), FLIPS_SHOWN[0 if few else 1])
        pairs.append({"a": a, "b": b, **pair, "flips": shown})
    primary = [pair["tests"][0] for pair in pairs if pair["tests"]]
    for test, adjusted in zip(
        primary, adjust_p_values([test["p_value"] for test in primary]), strict=True
    ):
        test["adjusted"] = adjusted
    return pairs


def _compare(run_a: Run, run_b: Run, few: bool) -> tuple[Pair, list[dict[str, Any]]]:
    """Return the comparison of run B with run A without its flips, and all flips."""
    first, second = run_a.evaluations[-1], run_b.evaluations[-1]
    ids_a, ids_b = _get_ids(first), _get_ids(second)
    changed = _find_changed(run_a, run_b)
    names = [name for name in first.values if name in second.values]
    names.sort(key=lambda name: (name != run_b.primary_metric, name))
    tests, flips = [], []
    for name in names if few else names[:1]:
        a, b = first.values[name], second.values[name]
        ids = [i for i in a if i in b and i not in changed]
        if not ids:
            continue
        lower_is_better = second.lower_is_better and name == second.primary_metric
        if not tests:
            flips = _list_flips(ids, a, b, lower_is_better)
        test = compare_pairs([a[i] for i in ids], [b[i] for i in ids], run_a.seed)
        tests.append(
            {
                **asdict(test),
                "name": display_text(name, 60),
                "share": all(0 <= value <= 1 for i in ids for value in (a[i], b[i])),
                "lowerIsBetter": lower_is_better,
                "adjusted": test.p_value,
            }
        )
    pair = {
        "steps": [first.step, second.step],
        "n": len((ids_a & ids_b) - changed),
        "onlyA": len(ids_a - ids_b),
        "onlyB": len(ids_b - ids_a),
        "changed": len(changed),
        "primary": display_text(run_b.primary_metric or "", 60),
        "tests": tests,
        "better": len(_select(flips, better=True)),
        "worse": len(_select(flips, better=False)),
    }
    return pair, flips


def _get_ids(evaluation: HeldOutEvaluation) -> set[str]:
    return {id_ for values in evaluation.values.values() for id_ in values}


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


def _list_flips(
    ids: Sequence[str], a: Mapping[str, float], b: Mapping[str, float], lower_is_better: bool
) -> list[dict[str, Any]]:
    """Return the examples whose values differ, the largest differences first."""
    flips = [
        {"id": i, "a": a[i], "b": b[i], "better": (b[i] > a[i]) != lower_is_better}
        for i in ids
        if a[i] != b[i]
    ]
    return sorted(flips, key=lambda flip: -abs(flip["b"] - flip["a"]))


def _shorten(
    flips: Sequence[dict[str, Any]], outputs: Sequence[Mapping[str, str]], limit: int
) -> list[dict[str, Any]]:
    """Return the first flips of each direction, with the output of A and that of B."""
    shown = [f for better in (True, False) for f in _select(flips, better)[:limit]]
    return [
        {
            **flip,
            "id": display_text(flip["id"], 200),
            "outputs": [display_text(o.get(flip["id"], ""), OUTPUT_CHARACTERS) for o in outputs],
        }
        for flip in shown
    ]


def _select(flips: Sequence[dict[str, Any]], better: bool) -> list[dict[str, Any]]:
    return [flip for flip in flips if flip["better"] == better]
