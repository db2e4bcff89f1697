"""Data and tasks that several commands are run on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run, write_jsonl

LETTERS = '''
import time

from vlm_grpo.task import Task, metric, reward


class Letters(Task):
    """Name a letter."""

    primary_metric = "right"

    def parse(self, text, example):
        {parse}

    def write(self, answer, example):
        {write}

    @reward(weight=2.0)
    def right(self, answer, example):
        {right}
'''


@pytest.fixture
def succeed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command, which must end with status 0, and returns its output."""

    def succeed(*words: object) -> str:
        status, out, err = run(capsys, *words)
        assert status == 0, err
        return out

    return succeed


@pytest.fixture
def letters_data(tmp_path: Path) -> Path:
    """Two rows without images, whose answers are a and b."""
    rows = [{"id": letter, "question": "Which?", "answer": letter} for letter in "ab"]
    return write_jsonl(tmp_path / "letters.jsonl", *rows)


@pytest.fixture
def write_letters(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a task for ``letters_data``, with methods as given."""

    def write_letters(
        parse: str = "return text if len(text) == 1 else None",
        right: str = "return float(answer == example.answer)",
        write: str = "return answer",
    ) -> Path:
        path = tmp_path / "letters.py"
        path.write_text(LETTERS.format(parse=parse, right=right, write=write))
        return path

    return write_letters
