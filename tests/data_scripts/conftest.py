"""Fixtures that run a converter's command line on a small dataset."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example


class ConversionResult:
    """The output of a converter's command.

    Attributes:
        rows: the written rows, as JSON.
        examples: the written rows, loaded by the toolkit's loader.
        output: the text printed to stdout.
        reasons: number of refused rows by reason.
    """

    def __init__(self, out: Path, images: Path, task: str, output: str) -> None:
        self.output = output
        self.rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        data = DataSettings(train=str(out), image_root=images)
        self.examples: list[Example] = list(load_examples(str(out), load_task(task), data))
        self.reasons = {
            reason: int(count)
            for count, reason in re.findall(r"(\d+) × (.*?)(?: \(first.*)?\n", output)
        }

    @property
    def answers(self) -> dict[str, Any]:
        return {row["id"]: row["answer"] for row in self.rows}


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., ConversionResult]:
    """Return a function that runs a converter by its module's name and loads its output.

    The sources of these tests are parts of a dataset.
    """

    def run(name: str, source: Path | str, images: Path, **arguments: Any) -> ConversionResult:
        converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert
        out = tmp_path / "out" / f"{name}.jsonl"
        argv = ["--source", str(source), "--images", str(images), "--out", str(out)]
        argv.append("--allow-partial")
        for option, value in arguments.items():
            argv += [f"--{option}", str(value)]
        capsys.readouterr()
        assert converter.main(argv) == 0, capsys.readouterr().err
        task = arguments.get("task", converter.tasks[0])
        return ConversionResult(out, images, task, capsys.readouterr().out)

    return run


@pytest.fixture
def convert_with_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Return a function that runs a converter that must fail without leaving files behind.

    The function returns the error message.
    """

    def run(name: str, source: Path | str, images: Path, **arguments: Any) -> str:
        converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert
        out = tmp_path / "failed" / f"{name}.jsonl"
        argv = ["--source", str(source), "--images", str(images), "--out", str(out)]
        for option, value in arguments.items():
            argv += [f"--{option}", str(value)]
        before = sorted(images.rglob("*")) if images.exists() else []
        assert converter.main(argv) == 2
        assert list(out.parent.glob("*")) + list(out.parent.glob(".*")) == []
        after = [path for path in images.rglob("*") if path.is_file()] if images.exists() else []
        assert [path for path in after if path not in before] == []
        return capsys.readouterr().err

    return run
