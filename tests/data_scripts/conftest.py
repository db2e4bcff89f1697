"""A converter's command run on a small dataset, and what it wrote or said."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.registry import load_task
from vlm_grpo.types import Example


class Conversion:
    """What a converter's command did.

    Attributes:
        rows: the rows that were written, as JSON.
        examples: the same rows through the toolkit's loader.
        told: what it printed.
        reasons: how many rows were refused for which reason.
    """

    def __init__(self, out: Path, images: Path, task: str, options: Mapping, told: str) -> None:
        self.told = told
        self.rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        data = DataSettings(train=str(out), image_root=images)
        self.examples: list[Example] = load_examples(str(out), load_task(task, **options), data)
        self.reasons = {
            reason: int(count)
            for count, reason in re.findall(r"(\d+) × (.*?)(?: \(first.*)?\n", told)
        }

    @property
    def answers(self) -> dict[str, Any]:
        return {row["id"]: row["answer"] for row in self.rows}


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., Conversion]:
    """Run a converter by its module's name on a source, and load what it wrote."""

    def run(name: str, source: Path | str, images: Path, **arguments: Any) -> Conversion:
        converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").CONVERTER
        out = tmp_path / "out" / f"{name}.jsonl"
        argv = ["--source", str(source), "--images", str(images), "--out", str(out)]
        for option, value in arguments.items():
            argv += [f"--{option}", str(value)]
        capsys.readouterr()
        assert converter.main(argv) == 0, capsys.readouterr().err
        task = arguments.get("task", converter.tasks[0])
        return Conversion(out, images, task, converter.options, capsys.readouterr().out)

    return run


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run a converter that must fail; the message, after checking that nothing was left behind."""

    def run(name: str, source: Path | str, images: Path, **arguments: Any) -> str:
        converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").CONVERTER
        out = tmp_path / "failed" / f"{name}.jsonl"
        argv = ["--source", str(source), "--images", str(images), "--out", str(out)]
        for option, value in arguments.items():
            argv += [f"--{option}", str(value)]
        before = sorted(images.rglob("*")) if images.exists() else []
        assert converter.main(argv) == 1
        assert list(out.parent.glob("*")) + list(out.parent.glob(".*")) == []
        after = [path for path in images.rglob("*") if path.is_file()] if images.exists() else []
        assert [path for path in after if path not in before] == []
        return capsys.readouterr().err

    return run
