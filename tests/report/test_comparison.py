"""Runs are compared pairwise on the examples that both have answered."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from browser import read_last_evaluation
from report_runs import make_run

from vlm_grpo.errors import UserError
from vlm_grpo.eval.statistics import mcnemar_p_value
from vlm_grpo.report import comparison, sweep
from vlm_grpo.report.run import Run, read_run


def last_rows(run: Run) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_last_evaluation(run.folder)}


def test_flips_and_test_are_those_of_the_evaluations(tmp_path):
    """Of three counting runs of rising skill on the same 24 held-out examples."""
    runs = [
        (str(skill), read_run(make_run(tmp_path, steps=4, seed=seed, skill=(0.2, skill))))
        for seed, skill in enumerate((0.3, 0.6, 0.95))
    ]
    pairs = comparison.build_pairs(runs)
    assert [(pair["a"], pair["b"]) for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    for pair in pairs:
        rows = [last_rows(runs[pair[side]][1]) for side in "ab"]
        a, b = ({i: row["rewards"]["exact"] for i, row in own.items()} for own in rows)
        gained = {i for i in a if b[i] > a[i]}
        lost = {i for i in a if b[i] < a[i]}
        for flip in pair["flips"]:
            assert (flip["a"], flip["b"]) == (a[flip["id"]], b[flip["id"]])
            for own, output in zip(rows, flip["outputs"], strict=True):
                assert own[flip["id"]]["output"].startswith(output.partition(" …")[0])
        assert {flip["id"] for flip in pair["flips"] if flip["better"]} == gained
        assert {flip["id"] for flip in pair["flips"] if not flip["better"]} == lost
        test = pair["tests"][0]
        assert (test["name"], test["test"], test["n"]) == ("exact", "McNemar", 24)
        assert test["p_value"] == mcnemar_p_value(len(gained), len(lost))
        assert (pair["better"], pair["worse"]) == (len(gained), len(lost))
        assert (pair["onlyA"], pair["onlyB"], pair["changed"]) == (0, 0, 0)
    error = next(test for test in pairs[1]["tests"] if test["name"] == "absolute_error")
    assert error["test"] == "sign flips"
    assert pairs[1]["better"] > pairs[1]["worse"]  # 0.3 against 0.95
    # Holm: three times the smallest p-value.
    first = min(pairs, key=lambda pair: pair["tests"][0]["p_value"])["tests"][0]
    assert first["adjusted"] == pytest.approx(min(1.0, 3 * first["p_value"]))


def edit(run: Run, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Run:
    """Change the rows of a run's evaluations and samples, and read it again."""
    for path in (*run.folder.glob("evaluation/*.jsonl"), *run.folder.glob("samples/held*.jsonl")):
        rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))
    return read_run(run.folder)


def test_examples_that_do_not_match_are_left_out_and_counted(tmp_path):
    a = read_run(make_run(tmp_path, steps=2, held_out=8, seed=0))
    b = read_run(make_run(tmp_path, steps=2, held_out=8, seed=1))
    ids = sorted(last_rows(a))

    def change(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["id"] == ids[0]:
            return None
        if row["id"] == ids[1]:
            return {**row, "id": "other"}
        return {**row, "question": "Another?"} if row["id"] == ids[2] else row

    (pair,) = comparison.build_pairs([("a", a), ("b", edit(b, change))])
    assert (pair["onlyA"], pair["onlyB"], pair["changed"], pair["n"]) == (2, 1, 1, 5)
    assert pair["tests"][0]["n"] == 5
    assert not {ids[0], ids[1], ids[2], "other"} & {flip["id"] for flip in pair["flips"]}
    b = edit(b, lambda row: {**row, "id": f"other {row['id']}"})
    (pair,) = comparison.build_pairs([("a", a), ("b", b)])
    assert (pair["n"], pair["tests"], pair["flips"]) == (0, [], [])
    (tmp_path / "config.yaml").write_text("task: counting\n")
    bare = read_run(tmp_path)  # nothing was evaluated
    assert comparison.build_pairs([("a", a), ("bare", bare)]) == []


RATES = (1e-6, 1e-5, 1e-5, 1e-4)


def test_settings_in_which_three_runs_differ_are_chosen_and_plotted(tmp_path):
    """Four runs with three learning rates and two losses."""
    swept_runs, swept = [], ["objective.loss_type", "optim.lr"]
    for seed, loss in enumerate(("grpo", "grpo", "dr_grpo", "dr_grpo")):
        changes = {"optim.lr": RATES[seed], "objective.loss_type": loss}
        run = make_run(tmp_path, steps=2, held_out=6, seed=seed, overrides=changes)
        swept_runs.append((f"run-{seed}", read_run(run)))
    runs = [run for _, run in swept_runs]
    assert list(sweep.list_differences(runs)) == ["name", *swept, "seed"]
    assert sweep.choose_swept(runs) == swept
    assert sweep.choose_swept(runs[:2]) == []  # two runs are a comparison
    assert sweep.choose_swept(runs[:2], ["optim.lr"]) == ["optim.lr"]
    with pytest.raises(UserError, match=r"--sweep optim.l: .*did you mean optim.lr.*these do: obj"):
        sweep.choose_swept(runs, ["optim.l"])

    loss, rate = sweep.build_sweep_charts(swept_runs, swept, together=False)
    assert (rate.title, rate.axis, rate.logarithmic_x) == ("exact by optim.lr", "optim.lr", True)
    (line,) = rate.lines
    assert list(line.x) == sorted(RATES)
    assert line.labels == ["run-0", "run-1", "run-2", "run-3"]
    bounds = zip(line.y, line.low or (), line.high or (), strict=True)
    for (_, run), (y, low, high) in zip(swept_runs, bounds, strict=True):
        assert y == run.evaluations[-1].metrics["exact"]
        assert low <= y <= high
    assert loss.ticks == ["dr_grpo", "grpo"]  # names have no order but the alphabet's
    assert not loss.logarithmic_x
    assert list(loss.lines[0].x) == [0, 0, 1, 1]
    (chart,) = sweep.build_sweep_charts(swept_runs, swept[::-1], together=True)
    assert {line.name: list(line.x) for line in chart.lines} == {
        "objective.loss_type = grpo": [1e-6, 1e-5],
        "objective.loss_type = dr_grpo": [1e-5, 1e-4],
    }
    # Runs of different metrics are not plotted.
    other = read_run(make_run(tmp_path, "grounding", steps=2, held_out=4))
    mixed = [*swept_runs, ("grounding", other)]
    assert list(sweep.build_sweep_charts(mixed, ["optim.lr"], together=False)) == []
