"""The measurements of a GPU run on any machine with a tiny model, and fill the table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "perf/gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_all_parts_run_with_a_tiny_model_and_are_not_run_again(tmp_path: Path) -> None:
    readme = (ROOT / "perf/README.md").read_bytes()
    done = run("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {"step-64", "step-64-trl", "step-2048", "profile", "plan", "24gb"} <= results.keys()
    assert (tmp_path / "step.json.gz").is_file()
    for result in results.values():
        assert result["output"]
        assert result["versions"]["torch"]
    phases = results["step-64"]["figures"]["engines"]["shared"]["phases"]
    assert phases["decode"] > 0
    again = run("--smoke", "--out", str(tmp_path))
    assert again.returncode == 0
    assert "step-64" not in again.stdout
    assert (ROOT / "perf/README.md").read_bytes() == readme


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_message() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "perf/gpu.py: PyTorch finds no CUDA GPU here; --smoke runs anywhere"
    )


def test_results_fill_the_table_in_the_order_of_the_parts(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = gpu
    spec.loader.exec_module(gpu)
    for name in ("vision", "step-64"):
        result = {"what": name, "command": "python x", "gpu": "H100", "versions": {"torch": "2"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"output": ["| a |"]}))
    filled = gpu.fill_table((ROOT / "perf/README.md").read_text(), tmp_path)
    first = filled.index("**step-64**: step-64. `python x`, H100, torch 2.")
    assert first < filled.index("**vision**")
    assert gpu.fill_table(filled, tmp_path) == filled
    assert set(gpu.PARTS["step-64"].arguments.split()) >= {"qwen2.5-vl-7b", "1008", "8"}
