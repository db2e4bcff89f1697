"""Every command of the guides is run, in a small form where it would take long.

A command that would load a model of the hub asks the embedded one here; ``test_docs.py`` checks its
settings as they stand. One that launches several processes runs in one: ``test_ranks.py`` launches.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from guide_worlds import BEFORE, GUIDES, ROOT, WORLDS, run, shell_lines

STEP = 2
"""The last step of the runs that the commands make."""

ELSEWHERE = {
    "make quickstart": ".ci/run runs it",
    "make test": ".ci/run runs it",
    "source .venv/bin/activate": "changes the reader's shell alone",
    "pip install --constraint constraints.txt .": "tests/test_package.py installs the wheel",
    "python -m pytest tests/tasks/test_reward_hacking.py -s": "it is one of the tests",
}
"""Commands that are not run here, and why."""

with_commands = [guide for guide in GUIDES if shell_lines(guide)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that two of the guides take for made before: ``quickstart`` and ``mine``."""
    folder = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("vlm-grpo train quickstart", STEP)
    shutil.copytree(folder / "runs/quickstart", folder / "runs/mine")
    return folder / "runs"


@pytest.mark.parametrize("guide", with_commands, ids=lambda path: path.name)
def test_every_command_runs(
    guide: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")
    if guide.name in ("README.md", "benchmarks.md"):
        shutil.copytree(runs, "runs")
    WORLDS.get(guide.name, lambda: None)()
    for line in dict.fromkeys(shell_lines(guide)):
        if line in ELSEWHERE:
            continue
        for part, prepare in BEFORE.items():
            if part in line:
                prepare()
        run(line, STEP)


def test_every_block_with_a_command_is_one_of_the_shell() -> None:
    for guide in GUIDES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.M)
        for language, text in blocks:
            if re.search(r"^(vlm-grpo|python|pip|make|accelerate) ", text, re.MULTILINE):
                assert language == "sh", f"{guide.name}: {text}"


def test_what_is_run_elsewhere_is_still_in_a_guide() -> None:
    assert set(ELSEWHERE) <= {line for guide in GUIDES for line in shell_lines(guide)}
