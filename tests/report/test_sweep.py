"""Settings that differ between runs, and the primary metric against them."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import make_run

from vlm_grpo.errors import UserError
from vlm_grpo.report.run import Run, read_run
from vlm_grpo.report.sweep import build_sweep_charts, choose_swept, list_differences

RATES = (1e-6, 1e-5, 1e-5, 1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Run]]:
    """Four runs with three learning rates and two losses."""
    folder = tmp_path_factory.mktemp("runs")
    losses = ("grpo", "grpo", "dr_grpo", "dr_grpo")
    return [
        (
            f"run-{seed}",
            read_run(
                make_run(
                    folder, steps=2, held_out=6, seed=seed,
                    overrides={"optim.lr": rate, "objective.loss_type": loss},
                )
            ),
        )
        for seed, (rate, loss) in enumerate(zip(RATES, losses, strict=True))
    ]  # fmt: skip


def get_runs(runs: list[tuple[str, Run]]) -> list[Run]:
    return [run for _, run in runs]


def test_settings_in_which_three_runs_differ_are_chosen(runs: list[tuple[str, Run]]) -> None:
    keys = [difference.key for difference in list_differences(get_runs(runs))]
    assert keys == ["name", "objective.loss_type", "optim.lr", "seed"]
    assert choose_swept(get_runs(runs)) == ["objective.loss_type", "optim.lr"]
    assert choose_swept(get_runs(runs)[:2]) == []  # two runs are a comparison
    assert choose_swept(get_runs(runs)[:2], ["optim.lr"]) == ["optim.lr"]
    with pytest.raises(UserError, match=r"--sweep optim.l: .*did you mean optim.lr.*these do: obj"):
        choose_swept(get_runs(runs), ["optim.l"])


def test_each_run_is_a_point_at_its_setting(runs: list[tuple[str, Run]]) -> None:
    loss, rate = build_sweep_charts(runs, choose_swept(get_runs(runs)), together=False)
    assert (rate.title, rate.axis, rate.logarithmic_x) == ("exact by optim.lr", "optim.lr", True)
    (line,) = rate.lines
    assert list(line.x) == sorted(RATES)
    assert line.labels == ["run-0", "run-1", "run-2", "run-3"]
    for (_, run), y, low, high in zip(runs, line.y, line.low or (), line.high or (), strict=True):
        assert y == run.evaluations[-1].mean("exact")
        assert low <= y <= high
    assert loss.ticks == ["dr_grpo", "grpo"]  # names have no order but the alphabet's
    assert not loss.logarithmic_x
    assert list(loss.lines[0].x) == [0, 0, 1, 1]


def test_the_second_setting_has_a_line_per_value(runs: list[tuple[str, Run]]) -> None:
    swept = ["optim.lr", "objective.loss_type"]
    (chart,) = build_sweep_charts(runs, swept, together=True)
    assert [line.name for line in chart.lines] == [
        "objective.loss_type = grpo",
        "objective.loss_type = dr_grpo",
    ]
    assert [list(line.x) for line in chart.lines] == [[1e-6, 1e-5], [1e-5, 1e-4]]


def test_runs_of_different_metrics_are_not_plotted(
    runs: list[tuple[str, Run]], tmp_path: Path
) -> None:
    other = read_run(make_run(tmp_path, "grounding", steps=2, held_out=4))
    mixed = [*runs, ("grounding", other)]
    assert list(build_sweep_charts(mixed, ["optim.lr"], together=False)) == []
