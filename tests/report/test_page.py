"""The report's parts, on run folders that a trainer could have left."""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_runs import GROUP_SIZE, TASKS, few_examples, group, make_run, with_alarms

from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task
from vlm_grpo.report import build_report, compare_runs
from vlm_grpo.report.charts import Chart, Line, draw, tick
from vlm_grpo.report.entries import (
    as_json,
    held_out_entries,
    split_text,
    spread_out,
    training_entries,
    visible,
)
from vlm_grpo.report.gallery import gallery
from vlm_grpo.report.panels import charts, comparison
from vlm_grpo.report.run import read_run
from vlm_grpo.task import Task
from vlm_grpo.tracking.samples import THUMBNAIL_BYTES, write_samples
from vlm_grpo.types import Example, Group
from vlm_grpo.utils.bootstrap import bootstrap_interval


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), "counting", steps=20)


@pytest.mark.parametrize("task", TASKS)
def test_page_of_each_task(task: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path, task, steps=8, held_out=6)
    page = build_report(folder)
    assert page == folder / "report.html"
    text = page.read_text("utf-8")
    change = read_run(folder).change()
    assert change is not None
    # Six held-out answers, so the share is a multiple of a sixth, written to a tenth of a percent.
    assert f"{100 * change.after:.1f}\N{NO-BREAK SPACE}%" in text
    assert "Held out: " in text
    assert "Time of a step by phase" in text
    assert "http://" not in text.replace("http://www.w3.org", "")  # but for the names of SVG
    assert not list(folder.glob("*.tmp"))


def test_headline_is_the_evaluations_own(counting: Path) -> None:
    change = read_run(counting).change()
    assert change is not None
    for step, value, interval in (
        (0, change.before, change.before_interval),
        (20, change.after, change.after_interval),
    ):
        lines = (counting / "evaluation" / f"step-{step:06d}.jsonl").read_text().splitlines()
        values = [json.loads(line)["rewards"]["exact"] for line in lines]
        assert value == pytest.approx(sum(values) / len(values))
        assert interval == pytest.approx(bootstrap_interval(values, seed=0))
    # On the same examples, the difference of means is the mean of differences.
    low, high = change.difference_interval
    assert low <= change.after - change.before <= high


def test_training_entry_holds_its_group(counting: Path) -> None:
    run = read_run(counting)
    entries, skipped = training_entries(run)
    assert skipped == 0
    assert len(entries) == 8  # four groups at each of the steps 0 and 10
    for entry in entries:
        assert len(entry["answers"]) == GROUP_SIZE
        rewards = [answer["reward"] for answer in entry["answers"]]
        assert entry["spread"] == max(rewards) - min(rewards)
        for answer in entry["answers"]:
            assert (answer["kind"] == "right") == (answer["rewards"]["exact"] == 1.0)


def test_kinds_of_failure() -> None:
    task = load_task("counting", tags=True)
    example = few_examples("counting", task)[0]
    texts = {
        "right": task.gold(example),
        "wrong": "<answer>99</answer>",
        "no answer": "many",
        "truncated": "<answer>",
    }
    sampled = group(task, example, list(texts.values()))
    stopped = replace(sampled.completions[2], stop="eos")
    completions = (*sampled.completions[:2], stopped, sampled.completions[3])
    broken = replace(sampled.scores[0], total=None, rewards={"exact": None})
    sampled = replace(sampled, completions=completions)
    assert _kinds(sampled, task) == list(texts)
    sampled = replace(sampled, scores=(broken, *sampled.scores[1:]))
    assert _kinds(sampled, task)[0] == "unscorable"


def _kinds(sampled: Group, task: Task) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        advantages = [[0.0] * len(sampled.completions)]
        write_samples(Path(folder, "samples"), 0, [sampled], advantages, task)
        entries, _ = training_entries(read_run(Path(folder)))
    return [answer["kind"] for answer in entries[0]["answers"]]


def test_changes_since_the_start(counting: Path) -> None:
    entries, _ = held_out_entries([("", read_run(counting))])
    assert len(entries) == 24
    for entry in entries:
        assert [answer["step"] for answer in entry["answers"]] == [0, 5, 10, 15, 20]
        first, last = entry["answers"][0], entry["answers"][-1]
        assert (
            entry["change"]
            == last["metrics"].get("exact", last["rewards"]["exact"]) - (first["rewards"]["exact"])
        )
    assert any(entry["change"] for entry in entries)


def test_change_between_two_runs(tmp_path: Path) -> None:
    worse = read_run(make_run(tmp_path, "counting", steps=4, seed=1, skill=(0.0, 0.0)))
    better = read_run(make_run(tmp_path, "counting", steps=4, seed=2, skill=(1.0, 1.0)))
    entries, _ = held_out_entries([("worse", worse), ("better", better)])
    assert {entry["change"] for entry in entries} == {1.0}  # all wrong, then all right
    labels = [answer["label"] for answer in entries[0]["answers"]]
    assert labels[0] == "worse · step 0"
    assert labels[-1] == "better · step 4"


def test_example_that_was_sampled_twice(tmp_path: Path) -> None:
    task = load_task("counting")
    example = few_examples("counting", task)[0]
    right, wrong = task.gold(example), "99"
    for step, texts in ((0, [right, wrong]), (5, [right, right])):
        write_samples(tmp_path / "samples", step, [group(task, example, texts)], [[0, 0]], task)
    entries, _ = training_entries(read_run(tmp_path))
    assert [entry["change"] for entry in entries] == [None, 0.5]  # half right, then all


def test_page_of_a_thousand_samples_is_small(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    images = folder / "images"
    images.mkdir(parents=True)
    rows: dict[int, list[str]] = {}
    chance = np.random.default_rng(0)
    for number in range(1000):
        picture = f"{number:032x}.webp"
        (images / picture).write_bytes(chance.bytes(THUMBNAIL_BYTES))  # the most that is kept
        answer = {
            "text": f"<think>{'word ' * 100}</think><answer>{number}</answer>",
            "stop": "eos", "tokens": 120, "answer": number, "rewards": {"exact": 1.0},
            "reward": 1.0, "metrics": {"absolute_error": 0.0}, "advantage": 0.0,
        }  # fmt: skip
        row = {"step": number // 4, "id": str(number), "pictures": [picture], "gold": 1}
        rows.setdefault(number // 4, []).append(json.dumps(row | {"completions": [answer] * 8}))
    for step, lines in rows.items():
        (folder / f"step-{step:06d}.jsonl").write_text("\n".join(lines))
    size = build_report(tmp_path).stat().st_size
    # A thousand pictures of 12 kB are 16 MB in base64, and the texts are above 1 MB.
    assert 17e6 < size < 25e6
    assert len(gallery([("", read_run(tmp_path))]).entries) == 1000


def test_training_groups_are_thinned_out_evenly(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, "ocr", steps=12, held_out=2, samples_every=1))
    everything = gallery([("", run)])
    assert (len(everything.entries), everything.left_out) == (2 + 48, 0)  # four groups a step
    texts = sum(len(as_json(entry)) for entry in everything.entries)
    pictures = sum(len(uri) for uri in everything.pictures.values())
    fewer = gallery([("", run)], limit=(texts + pictures) // 2)
    steps = sorted({e["step"] for e in fewer.entries if e["view"] == "training"})
    assert (steps[0], steps[-1]) == (0, 11)  # the ends are kept
    assert 3 <= len(steps) <= 6  # about half of twelve
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 4  # and evenly
    assert fewer.left_out == 4 * (12 - len(steps))


def test_too_large_held_out_answers_are_cut(counting: Path) -> None:
    shown = gallery([("", read_run(counting))], limit=20_000)
    assert 0 < len(shown.entries) < 24
    assert {entry["view"] for entry in shown.entries} == {"held-out"}


def test_broken_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "counting", steps=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # cut off by a crash
    rows = [
        "[1, 2]",
        '{"step": "three", "id": "x"}',
        '{"step": 3, "id": "x", "completions": "none", "gold": 1}',
        '{"step": 3, "id": "y", "gold": NaN, "completions": [{"text": "a\\ud800b", "answer": null,'
        ' "rewards": {"exact": NaN}, "reward": Infinity}]}',
    ]
    (folder / "samples" / "step-000003.jsonl").write_text("\n".join(rows))
    run = read_run(folder)
    assert run.steps_done == 4
    assert run.unreadable == 2  # the cut line, and the list
    entries, skipped = training_entries(run)
    assert skipped == 1  # completions that are no list
    odd = next(entry for entry in entries if entry["id"] == "y")
    assert odd["answers"][0]["reward"] is None
    assert odd["answers"][0]["parts"] == [("answer", "a?b")]
    assert "3 lines of the run's files could not be read" in build_report(folder).read_text()


def test_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    task = load_task("ocr")
    example = few_examples("ocr", task)[0]
    texts = ["a\u2028b", "a\x85b", "a\ud800b"]
    write_samples(tmp_path / "samples", 0, [group(task, example, texts)], [[0, 0, 0]], task)
    run = read_run(tmp_path)
    assert run.unreadable == 0
    (entry,), _ = training_entries(run)
    shown = [answer["parts"][0][1] for answer in entry["answers"]]
    assert shown == ["a⟨U+2028⟩b", "a⟨U+0085⟩b", "a?b"]


def test_rows_reach_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.webp").write_bytes(b"secret")
    task = load_task("counting")
    example = few_examples("counting", task)[0]
    path = write_samples(tmp_path / "samples", 0, [group(task, example, ["1"])], [[0]], task)
    row = json.loads(path.read_text())
    row["pictures"] = ["../../secret.webp"]
    row["gold_marks"] = str(tmp_path / "secret.webp")
    path.write_text(json.dumps(row))
    shown = gallery([("", read_run(tmp_path))])
    assert len(shown.entries) == 1
    assert shown.pictures == {}


def test_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: counting\nmodel: m\noptim: {max_steps: 10}\n")
    text = build_report(tmp_path).read_text("utf-8")
    assert "step 0 of 10, not finished" in text
    assert "No two evaluations" in text
    assert "No samples yet" in text


def test_report_runs_no_code_of_the_folder(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('it was run')")
    (tmp_path / "config.yaml").write_text(f"task: {task}\n")
    assert read_run(tmp_path).primary_metric is None
    assert build_report(tmp_path).is_file()


def test_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path)
    with pytest.raises(UserError, match="no run folder"):
        build_report(tmp_path / "none")


def test_alarms_are_shown(counting: Path) -> None:
    assert "No alarms" in build_report(counting).read_text()
    alarm = {"step": 3, "name": "flat", "message": "all <equal>", "remedy": "harder examples"}
    with_alarms(counting, [alarm])
    text = build_report(counting).read_text()
    (counting / "alarms.jsonl").unlink()
    assert "all &lt;equal&gt;" in text
    assert "harder examples" in text


def test_comparison_names_what_differs(tmp_path: Path) -> None:
    first = make_run(tmp_path, "counting", steps=4, seed=0)
    second = make_run(tmp_path, "counting", steps=4, seed=1, overrides={"optim.lr": 0.125})
    page = compare_runs(first, second)
    assert page == tmp_path / "compare-counting-0-counting-1.html"
    text = page.read_text("utf-8")
    assert "<code>optim.lr</code></td><td>0.0001</td><td>0.125</td>" in text
    assert "<code>rollout.num_generations</code>" not in text  # the same in both


def test_charts_of_a_run(counting: Path) -> None:
    run = read_run(counting)
    titles = [chart.title for chart in charts(run)]
    assert titles[0] == "Held out: exact"  # the primary metric comes first
    for title in ("Reward", "Entropy", "KL to the reference", "Groups without a spread"):
        assert title in titles
    assert len(set(titles)) == len(titles)
    both = [chart.title for chart in comparison([("a", run), ("b", run)])]
    assert "Reward: exact" in both


def test_phases_add_up_to_the_step(counting: Path) -> None:
    chart = next(chart for chart in charts(read_run(counting)) if chart.stacked)
    names = [line.name for line in chart.lines]
    assert names == ["prompts", "prefill", "decode", "update", "other"]  # rollout holds three
    for values in zip(*(line.y for line in chart.lines), strict=True):
        assert sum(values) == pytest.approx(0.41)  # what the run says a step takes


def test_a_logarithmic_chart_of_zeros_is_drawn_without_a_warning() -> None:
    """As of a sampler that agrees with the trainer to the last bit."""
    drawn = draw(Chart("t", "h", [Line("a", [1, 2], [0.0, 0.0])], logarithmic=True))
    assert "<svg" in drawn.svg


def test_labels_of_small_values_are_whole() -> None:
    rates = [1e-6 * step / 4 for step in range(5)]
    svg = draw(Chart("Learning rate", "", [Line("learning_rate", range(5), rates)])).svg
    # Ticks at fourths of the peak, each with its own power of ten: nothing beside or over the axis.
    assert re.findall(r">([\d.]+(?:e-\d+)?)</text>", svg)[-5:] == [
        "0",
        "2.5e-7",
        "5e-7",
        "7.5e-7",
        "1e-6",
    ]
    assert (tick(5.6e-17, 1.0), tick(-0.25, 1.0), tick(12_345.0, 1e4)) == ("0", "-0.25", "1.23e4")


def test_chart_takes_the_pages_colours() -> None:
    drawn = draw(Chart("t", "h", [Line("a", range(1000), [math.nan, *range(999)])]))
    assert "var(--series-0)" in drawn.svg
    assert "#0" not in drawn.svg
    assert "<?xml" not in drawn.svg
    (line,) = drawn.data["lines"]  # type: ignore[misc]
    assert len(line["x"]) == len(line["y"]) <= 400
    assert draw(Chart("t", "h", [Line("a", [1, 2], [0, 1])])).svg == (
        draw(Chart("t", "h", [Line("a", [1, 2], [0, 1])])).svg
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("7", [("answer", "7")]),
        ("<think>a</think> <answer>7</answer>", [("thinking", "a"), ("answer", "7")]),
        ("<think>cut", [("thinking", "cut")]),
        ("a</think>b", [("thinking", "a"), ("answer", "b")]),
        ("x<answer>7</answer>y", [("text", "x"), ("answer", "7"), ("text", "y")]),
        ("<answer>7", [("answer", "7")]),
        ("  ", []),
    ],
)
def test_parts_of_a_completion(text: str, parts: list[tuple[str, str]]) -> None:
    assert split_text(text) == parts


def test_long_text_is_cut_with_a_note() -> None:
    shown = visible("x" * 100_000)
    assert shown == "x" * 4000 + " … (96,000 characters more)"


def test_json_can_stand_in_a_script() -> None:
    text = as_json({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}


def test_spread_out() -> None:
    assert spread_out([3, 5, 9], 8) == {3, 5, 9}
    chosen = spread_out(range(100), 5)
    assert chosen == {0, 25, 50, 74, 99}  # the ends, and evenly between


def test_example_without_an_image(tmp_path: Path) -> None:
    task = load_task("ocr")
    example = Example("plain", (), "What is written?", "A")
    write_samples(tmp_path / "samples", 0, [group(task, example, ["A"])], [[0]], task)
    (entry,), skipped = training_entries(read_run(tmp_path))
    assert skipped == 0
    assert entry["pictures"] == []
    assert build_report(tmp_path).is_file()


def test_a_mean_error_below_one_is_no_share(tmp_path: Path) -> None:
    run = make_run(tmp_path, "counting", steps=4, skill=(0.8, 0.9))
    shares = {chart.title: chart.share for chart in charts(read_run(run))}
    assert shares["Held out: exact"]
    assert not shares["Held out: absolute error"]  # single counts are off by 1 or 2
