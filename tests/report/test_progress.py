"""Progress is live in a terminal and plain in a pipe."""

import re

from commands import RECIPE, run
from rich.text import Text

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.report.progress import Progress
from vlm_grpo.utils.stopwatch import Stopwatch


def test_the_live_line_has_the_phase_and_the_last_step(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    stopwatch = Stopwatch()
    progress = Progress(load_settings("quickstart"), "edit_distance", stopwatch, 0, enabled=True)
    metrics = {"reward": 0.5, "completions/mean_length": 12.0, "time/step": 2.0}
    progress.advance(metrics | {"memory/resident": 1.5, "eval/edit_distance": 0.25})
    with stopwatch("evaluation"):
        _, line = progress.bar.get_renderables()
    assert isinstance(line, Text)
    assert line.plain.startswith("evaluation reward 0.500  held-out edit_distance 0.250")
    assert line.plain.endswith("1.5 GiB")
    with progress.bar.console.capture() as shown, progress:
        progress.bar.refresh()
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.get()).splitlines()
    assert "\x1b[" in shown.get()  # lines are drawn over
    assert f"1/{progress.total}" in rows[0]
    assert max(len(row.strip()) for row in rows) == 60  # cut at the terminal's width


def test_a_pipe_gets_plain_lines(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    given = [tmp_path / "tiny.yaml", f"output_dir={tmp_path}", "evaluation.every=1"]
    status, out, err = run(capsys, "train", *given)
    assert status == 0
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    (line,) = [line for line in err.splitlines() if line.startswith("step ")]
    parts = r"reward .* held-out exact .* samples/s .* GiB  [\d,]+ tokens/s  0 s left"
    assert re.fullmatch(f"step 2/2  {parts}", line)
    starts = ["model", "task", "data", "images", "rewards", "step", "attention", "optimizer"]
    starts += ["loss", "reference", "note", "run folder", "before", "after", "change", "best"]
    starts += ["report", "samples", "checkpoint", "next", ""]
    lines = out.splitlines()
    assert [text[:11].strip() for text in lines] == starts
    assert " vlm-grpo evaluate " in lines[-2]
    assert (tmp_path / "tiny/report.html").is_file()
