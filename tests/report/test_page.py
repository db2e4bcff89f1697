"""The page shows the results, the alarms and the settings of a run."""

from typing import Any

import pytest
from report_runs import make_run, write_alarms

from vlm_grpo import UserError, load_settings, train
from vlm_grpo.model.resolve import resolve_model
from vlm_grpo.report.charts import build_charts
from vlm_grpo.report.page import build_report, compare_runs
from vlm_grpo.report.run import read_run
from vlm_grpo.training.export import build_model_card
from vlm_grpo.utils.jsonl import read_rows


def test_a_page_has_results_charts_and_alarms_and_names_no_address(counting_run):
    page = build_report(counting_run)
    assert page == counting_run / "report.html"
    text = page.read_text("utf-8")
    change: Any = read_run(counting_run).change()
    assert f"{100 * change.after:.1f}\N{NO-BREAK SPACE}%" in text
    assert "Held out: " in text
    assert "Time per step by phase" in text
    assert "http://" not in text.replace("http://www.w3.org", "")  # SVG's namespaces
    assert not list(counting_run.glob("*.tmp"))
    assert "No alarms" in text
    alarm = {"step": 3, "name": "flat", "message": "all <equal>", "remedy": "harder examples"}
    write_alarms(counting_run, [alarm])
    text = build_report(counting_run).read_text()
    (counting_run / "alarms.jsonl").unlink()
    assert "all &lt;equal&gt;" in text
    assert "harder examples" in text


def test_a_run_without_steps_has_a_page_and_a_folder_without_a_run_has_none(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path)
    with pytest.raises(UserError, match="no run folder"):
        build_report(tmp_path / "none")
    (tmp_path / "config.yaml").write_text("task: counting\nmodel: m\noptim: {max_steps: 10}\n")
    text = build_report(tmp_path).read_text("utf-8")
    assert "step 0 of 10, not finished" in text
    assert "Fewer than two evaluations" in text
    assert "No samples yet" in text


def test_report_runs_no_code_of_the_folder(tmp_path):
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('executed')")
    (tmp_path / "config.yaml").write_text(f"task: {task}\n")
    assert read_run(tmp_path).primary_metric is None
    assert build_report(tmp_path).is_file()


def test_a_change_is_colored_by_its_interval(tmp_path):
    skills = {"": (0.0, 0.0), " better": (0.0, 1.0), " worse": (1.0, 0.0)}
    for seed, (verdict, skill) in enumerate(skills.items()):
        run = make_run(tmp_path, steps=2, held_out=8, skill=skill, seed=seed)
        text = build_report(run).read_text("utf-8")
        assert f'<span class="after{verdict}">{100 * skill[1]:.1f}\N{NO-BREAK SPACE}%' in text


def test_many_runs_are_rows_of_a_table(tmp_path):
    runs = [
        make_run(tmp_path, steps=2, held_out=4, seed=seed, overrides={"optim.lr": 10.0**-seed})
        for seed in range(5)
    ]
    page = compare_runs(runs)
    assert page.name == "compare-counting-0-counting-1-counting-2-counting-3-counting-4.html"
    text = page.read_text("utf-8")
    assert "<h1>5 runs</h1>" in text
    for seed, run in enumerate(runs):
        change: Any = read_run(run).change()
        assert f"</i>counting-{seed}</th>" in text
        assert f"<td><b>{100 * change.after:.1f}" in text
    assert "<b>exact by optim.lr</b>" in text  # the only setting that differs, besides the seed
    page = compare_runs(runs[:2])
    assert page == tmp_path / "compare-counting-0-counting-1.html"
    text = page.read_text("utf-8")
    assert "<code>optim.lr</code></td><td>1.0</td><td>0.1</td>" in text
    assert "<code>rollout.num_generations</code>" not in text  # equal in both
    long = [tmp_path / ("x" * 60 + run.name) for run in runs]
    for run, renamed in zip(runs, long, strict=True):
        run.rename(renamed)
    assert len(compare_runs(long).name) < 60
    with pytest.raises(UserError, match="is given twice"):
        compare_runs([*long, long[0]])


@pytest.mark.parametrize("name", ["absolute_error", "rmse"])
def test_the_page_and_the_model_card_of_an_error_say_that_lower_is_better(name, tmp_path):
    benchmark = tmp_path / "errors.yaml"
    benchmark.write_text(f"title: E\ntask: counting\nmetric: {name}\nsplits: {{test: 12}}\n")
    words = ["optim.max_steps=2", "optim.prompts_per_step=2", "optim.warmup_steps=0"]
    words += ["data.train_limit=20", "data.eval_limit=12", f"output_dir={tmp_path}"]
    words.append(f"evaluation.benchmark={benchmark}")
    error_run = train(load_settings("counting", words)).run_dir
    run = read_run(error_run)
    assert run.primary_metric == name
    change: Any = run.change()
    logged = read_rows(error_run / "metrics.jsonl")[-1]
    assert change.after == pytest.approx(logged[f"eval/{name}"])
    assert (change.n, change.lower_is_better) == (12, True)
    page = build_report(error_run).read_text("utf-8")
    shown_name = name.replace("_", " ")
    assert f"{shown_name} on 12 held-out examples; lower is better" in page
    verdict = f" {change.verdict}" if change.verdict else ""
    assert f'<span class="after{verdict}">{change.after:.3f}</span>' in page
    assert 'class="scale"' not in page  # an error is not between 0 and 1
    assert ("95 % bootstrap intervals" in page) == (name == "absolute_error")
    assert ("this is a corpus metric" in page) == (name == "rmse")
    first = build_charts(run)[0]
    assert first.title == f"Held out: {shown_name}"
    assert "lower is better" in first.help
    assert not first.share
    assert (first.lines[0].low is None) == (name == "rmse")

    card = build_model_card(resolve_model(str(error_run)))
    assert f"{name} is an error: lower is better" in card
    assert f"| **{name}** | {change.before:.4f}" in card
    assert "nan" not in card
