"""The names by which tasks are saved in settings and loaded in another process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import get_short_name, get_task_name, load_task, load_task_class
from vlm_grpo.tasks.counting import Counting

CODE = """from __future__ import annotations
from vlm_grpo import Example, Task, reward


class Parity(Task):
    primary_metric = "exact"
    words: tuple[str, ...] = ("odd", "even")

    def parse(self, text, example):
        return text if text in self.words else None

    def write(self, answer, example):
        return answer

    @reward()
    def exact(self, answer, example):
        return float(answer == example.answer)
"""


def test_a_class_of_a_package_is_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/__init__.py").touch()
    (tmp_path / "zoo/parity.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("zoo.parity").Parity

    assert get_task_name(task) == "zoo.parity:Parity"
    assert load_task_class("zoo.parity:Parity") is task
    assert get_task_name(Counting) == "counting"


def test_a_class_of_a_file_is_named_by_the_files_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parity_file.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module("parity_file").Parity
    loaded = load_task_class(str(tmp_path / "parity_file.py"))

    for task in (imported, loaded):
        assert get_task_name(task) == f"{tmp_path / 'parity_file.py'}:Parity"
        assert vars(load_task(get_task_name(task), words=["a"]))["words"] == ("a",)
    del sys.modules["parity_file"]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Counting, "counting"),
        (Counting(), "counting"),
        ("counting", "counting"),
        ("tasks/clock.py", "clock"),
        ("tasks/clock.py:Hands", "clock"),
        ("zoo.clock:Hands", "hands"),
        ("<class test.<locals>.Hands>", "hands"),
    ],
)
def test_the_short_name_is_that_of_the_class_or_file(task: Any, name: str) -> None:
    assert get_short_name(task) == name


def test_a_module_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"no\.module:Parity cannot be loaded.*PYTHONPATH"):
        load_task("no.module:Parity")
    with pytest.raises(UserError, match="no task class Pariti"):
        load_task("vlm_grpo.tasks.counting:Pariti")
