"""Run folders are read as far as possible, and their results agree with the evaluations."""

import json
import math

from report_runs import make_run

from vlm_grpo.report.gallery import build_training_entries
from vlm_grpo.report.page import build_report
from vlm_grpo.report.run import read_run


def test_a_summary_takes_precedence_over_the_mean_of_examples_unless_it_is_malformed(tmp_path):
    """A benchmark's metric may be a mean over the means of groups."""
    folder = make_run(tmp_path, "counting", steps=4, held_out=6)
    path = folder / "evaluation/step-000004.json"
    summary = json.loads(path.read_text())
    mean = summary["metrics"]["exact"]
    summary["metrics"]["exact"] = mean / 2 + 0.01
    del summary["intervals"]
    path.write_text(json.dumps(summary))
    last = read_run(folder).evaluations[-1]
    assert last.metrics["exact"] == mean / 2 + 0.01
    assert math.isnan(last.get_interval("exact")[0])  # the examples' interval is of another mean
    for text in ("", "[]", "{}", '{"headline": 3, "metrics": {}}', "[" * 9000):
        for summary_path in (folder / "evaluation").glob("*.json"):
            summary_path.write_text(text)
        run = read_run(folder)
        assert run.primary_metric == "exact"  # from the samples
        assert run.change() is not None


def test_unreadable_lines_are_skipped_and_counted(tmp_path):
    folder = make_run(tmp_path, "counting", steps=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # truncated by a crash
    rows = [
        "[1, 2]",
        '{"step": "three", "id": "x"}',
        '{"step": 3, "id": "x", "completions": "none", "gold": 1}',
        '{"step": 3, "id": "z", "completions": [], "gold": 1, "sizes": [[Infinity, 1]]}',
        '{"step": 3, "id": "y", "gold": NaN, "completions": [{"text": "a\\ud800b", "answer": null,'
        ' "rewards": {"exact": NaN}, "reward": Infinity}]}',
    ]
    (folder / "samples" / "step-000003.jsonl").write_text("\n".join(rows))
    run = read_run(folder)
    assert run.steps_done == 4
    assert run.unreadable == 2  # the truncated line and the list
    entries, skipped = build_training_entries(run)
    assert skipped == 2  # the completions are not a list, the sizes no numbers of pixels
    malformed = next(entry for entry in entries if entry["id"] == "y")
    assert malformed["answers"][0]["reward"] is None
    assert malformed["answers"][0]["parts"] == [("answer", "a?b")]
    assert "4 lines of the run's files could not be read" in build_report(folder).read_text()
