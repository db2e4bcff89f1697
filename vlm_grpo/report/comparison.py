"""Comparison of runs, pairwise on the same held-out examples."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from vlm_grpo.eval.statistics import PairedTest, adjust_p_values, bootstrap_interval, compare_pairs
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
