"""Every command of the guides runs, in a short form if it would take long.

A command with a model from the hub runs with the embedded model; ``test_docs.py`` checks the
settings as written. A launch of several processes runs in one; ``tests/distributed`` launches them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from guide_commands import (
    EXTRA_FILES,
    FILES,
    GUIDES,
    ROOT,
    read_commands,
    remove_launcher,
    run_command,
)

STEP = 2
"""Last step of the runs that the commands start."""

NOT_RUN = {
    "make quickstart": "run by .ci/run",
    "make test": "run by .ci/run",
    "python pdf_validation.py --config configs/end2end.yaml": "a script of OmniDocBench",
    "python -m olmocr.bench.benchmark --dir bench_data --candidate olmocr-model-pages": "of olmOCR",
    "source .venv/bin/activate": "only changes the reader's shell",
    "pip install --constraint constraints.txt .": "tests/test_package.py installs the wheel",
    "python -m pytest tests/tasks/test_reward_hacking.py -s": "run as one of the tests",
    "python -m vlm_grpo.data_scripts.make_tiny_vlm --out tiny-vlm": "trains for half an hour",
    "vlm-grpo train judged data.train=train.jsonl data.eval=test.jsonl "
    "task_options.address=http://localhost:8000/v1 "
    "task_options.judge_model=Qwen/Qwen2.5-VL-72B-Instruct": "tests/tasks/test_judged.py trains",
}
NOT_RUN |= dict.fromkeys(
    [
        line
        for line in read_commands(ROOT / "docs/vllm.md")
        if "rollout.vllm" in line or "vllm/bin" in line
    ],
    "needs vLLM: tests/vllm samples, trains and serves with a real server",
)
NOT_RUN["python -m venv vllm"] = "tests/vllm/install.py makes such an environment"
"""Commands that do not run here, with the reason."""

RUNS = {
    "README.md": ("quickstart", "mine"),
    "benchmarks.md": ("quickstart", "mine"),
    "report.md": ("counting", "counting-lora", "lr-1", "lr-2", "lr-3"),
}
"""Runs that a guide expects; each is a copy of one run."""

GUIDES_WITH_COMMANDS = [guide for guide in GUIDES if read_commands(guide)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run ``quickstart``."""
    folder = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_command("vlm-grpo train quickstart", STEP)
    return folder / "runs"


@pytest.mark.parametrize("guide", GUIDES_WITH_COMMANDS, ids=lambda path: path.name)
def test_every_command_runs(
    guide: Path,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if guide.name == "small-worlds.md":
        pytest.importorskip("sklearn", reason="its digits are those of scikit-learn")
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")
    for name in RUNS.get(guide.name, ()):
        shutil.copytree(runs / "quickstart", Path("runs", name))
        config = Path("runs", name, "config.yaml")
        text = config.read_text().replace("name: quickstart", f"name: {name}")
        if name.startswith("lr-"):
            text = re.sub(r"(?m)^  lr: .*", f"  lr: {name[-1]}.0e-06", text)
        config.write_text(text)
    FILES.get(guide.name, lambda: None)()
    # A launch is the run that it starts, whatever its processes.
    for line in dict.fromkeys(map(remove_launcher, read_commands(guide))):
        if line in NOT_RUN:
            continue
        for part, prepare in EXTRA_FILES.items():
            if part in line:
                prepare()
        run_command(line, STEP)
    printed = {mask_numbers(line) for line in capsys.readouterr().out.splitlines()}
    quoted = re.findall(r"^```text\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert {mask_numbers(line) for line in "".join(quoted).splitlines()} <= printed


def mask_numbers(line: str) -> str:
    """Replace the numbers of a line: those of a short run differ from the guide's."""
    return re.sub(r"\d[\d.,]*", "#", line)


def test_blocks_with_commands_are_marked_as_shell() -> None:
    for guide in GUIDES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.M)
        for language, text in blocks:
            if re.search(r"^(vlm-grpo|python|pip|make|accelerate) ", text, re.MULTILINE):
                assert language == "sh", f"{guide.name}: {text}"


def test_commands_not_run_are_still_in_a_guide() -> None:
    assert set(NOT_RUN) <= {line for guide in GUIDES for line in read_commands(guide)}
