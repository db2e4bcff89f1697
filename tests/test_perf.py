"""The measurements of a GPU run on any machine with a tiny model, and fill the table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from vlm_grpo.utils.openmp import WAITING

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "perf/gpu.py"


def load(name: str) -> Any:
    """Load a script as a module, which finds the scripts that it imports."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"perf/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measure_all(folder: Path) -> str:
    """Run all parts with a tiny model, and return what is printed."""
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    process = forked.start(log, forked.run_program, PROGRAM, "--smoke", "--out", str(folder))
    process.join(forked.TIMEOUT)
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


@pytest.mark.slow
def test_all_parts_run_with_a_tiny_model_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    readme = (ROOT / "perf/README.md").read_bytes()
    folder = tmp_path / "results"
    assert "step-64" in measure_all(folder)
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    parts = importlib.import_module("gpu").PARTS
    runs = {name for name, part in parts.items() if part.available or not part.engines}
    assert results.keys() == runs - {"cuda-tests"}
    assert len([name for name in runs if name.startswith("3b-")]) >= 8
    assert (folder / "step.json.gz").is_file()
    for result in results.values():
        assert result["output"]
        assert result["versions"]["torch"]
    engines = results["step-64"]["figures"]["engines"]
    assert engines["shared"]["phases"]["decode"] > 0
    assert engines.keys() == {"shared", "trl"}
    assert all(engine["mfu"]["step"] > 0 for engine in engines.values())
    assert "| idle in phase |" in "".join(results["profile"]["output"])
    assert "step-64" not in measure_all(folder)
    assert (ROOT / "perf/README.md").read_bytes() == readme


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    monkeypatch.syspath_prepend(ROOT / "perf")
    assert load("gpu").main() == 2
    assert capsys.readouterr().err.strip() == (
        "perf/gpu.py: PyTorch finds no CUDA GPU here; --smoke runs anywhere"
    )


def test_results_fill_the_table_in_the_order_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    gpu = load("gpu")
    for name in ("vision", "step-64"):
        result = {"what": name, "command": "python x", "gpu": "H100", "versions": {"torch": "2"}}
        result |= {"figures": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"output": ["| a |"]}))
    filled = gpu.fill_table((ROOT / "perf/README.md").read_text(), tmp_path)
    first = filled.index("**step-64**: step-64. `python x`, H100, torch 2.")
    assert first < filled.index("**vision**")
    assert gpu.fill_table(filled, tmp_path) == filled
    assert set(gpu.PARTS["step-64"].arguments.split()) >= {"qwen2.5-vl-7b", "1008", "8"}


def test_our_steps_are_timed_as_the_commands_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    step_time, environments = importlib.import_module("step_time"), []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess:
        environments.append(options["env"])
        return subprocess.CompletedProcess(command, 0, stdout="{}")

    monkeypatch.setattr(subprocess, "run", run)
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    step_time.run_engine("trl", [])
    step_time.run_engine("shared", [])
    assert environments == [dict(os.environ), WAITING | os.environ]
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    step_time.run_engine("shared", [])
    assert environments[-1]["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize("workers", [0, 1])
def test_prompts_of_timed_steps_are_prepared_by_the_workers_asked_for(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    step_time = importlib.import_module("step_time")
    options = step_time.parse_arguments(["--smoke", "--workers", str(workers)])
    options.child = "shared"
    program, found = importlib.import_module("step_time_vlm_grpo"), []

    def build(settings: Any, *_: Any) -> None:
        found.append(settings.data.dataloader_num_workers)
        raise LookupError

    monkeypatch.setattr(program, "build_policy", build)
    with pytest.raises(LookupError):
        program.build_trainer(options, None, None, [])
    assert found == [workers]


@pytest.mark.parametrize(("name", "prompt_tokens"), [("internvl", 353), ("qwen3_5", 293)])
def test_a_step_of_another_family_is_timed_by_phase_and_form(
    name: str, prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    program = load("family_steps")
    found = program.measure(name, argparse.Namespace(sizes=[2], tokens=2, turns=1))
    assert found["prompt tokens"] == prompt_tokens
    for form in ("shared", "repeated"):
        (step,) = found["steps"][form]["2"]
        assert min(step.values()) > 0
        assert set(step) == {f"{p} {c}" for p in ("rollout", "update") for c in ("cpu", "wall")}
    rows = program.format_table({name: found}).splitlines()
    assert [row.split(" | ")[1] for row in rows[2:]] == ["shared", "repeated"]
    # Of the first group size to itself.
    assert all(row.endswith("| 1.0 (1.0 to 1.0) | 1.0 (1.0 to 1.0) |") for row in rows[2:])


def test_the_guide_has_the_recorded_steps_of_other_families(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    readme, program = (ROOT / "perf/README.md").read_text(), load("family_steps")
    for name in ("family_steps", "family_steps-64"):
        recorded = json.loads((ROOT / f"perf/results/{name}.json").read_text())["families"]
        assert program.format_table(recorded) in readme


def test_runs_are_read_as_they_were_saved(tmp_path: Path) -> None:
    saved = load("saved_runs")
    file = tmp_path / "runs.json"
    assert saved.load_runs(file) == []
    runs = [{"method": "grpo", "held_out": [[0, 0.5]]}, {"method": "é"}]
    for count in (1, 2):
        saved.save_runs(file, runs[:count])
        assert saved.load_runs(file) == runs[:count]
    assert file.read_text().count("\n") == 4  # a line for each run


def test_the_study_compares_with_plain_grpo_at_equal_samples_and_at_equal_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "perf")
    study = load("study")

    def run(method: str, seconds: float, values: list[float], right: str) -> dict[str, Any]:
        curve = [[10 * index, value] for index, value in enumerate(values)]
        given = {"task": "words", "method": method, "seed": 0, "held_out": curve, "right": right}
        return {**given, "cpu_seconds": seconds}

    plain = run("grpo", 20.0, [0.25, 0.5, 0.5], "1100")
    slow = run("papo", 40.0, [0.25, 0.5, 1.0], "1111")
    # After the 20 s of the plain run, the slow one is in the middle of its steps.
    assert study.value_at(slow, 20.0) == 0.5
    assert study.value_at(slow, 30.0) == 0.75
    assert study.value_at(plain, 40.0) == 0.5
    table = study.format_table([plain, slow]).splitlines()
    assert table[2] == "| words | grpo | 25.0 → 50.0 | – | – | 20 s |"
    # Two of four examples more are right; the bounds are quantiles of means of four values.
    change = re.escape("| words | papo | 25.0 → 100.0 | +50.0 [")
    assert re.fullmatch(change + r"\+0\.0, \+100\.0\] \| \+0\.0 \| × 2\.00 \|", table[3])
    assert study.format_table([slow]).count("\n") == 1  # nothing to compare it with
    recorded = json.loads((ROOT / "perf/results/study.json").read_text())
    assert study.format_table(recorded) in (ROOT / "docs/study.md").read_text("utf-8")
