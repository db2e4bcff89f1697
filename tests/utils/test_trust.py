"""Which code that a file names is refused, however the file writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_file
from vlm_grpo.utils import trust

LONG = "--compilation-config=" + " " * 5000 + '{"backend": "foreign.Backend"}'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("./foreign_program", Path("./foreign_program")),  # a path without ./, looked up in PATH
        ("foreign_program/", Path("foreign_program")),
        ("a/../foreign.py:function", Path("foreign.py")),
        (LONG, LONG),
    ],
)
def test_code_is_known_in_every_form(text, code, monkeypatch):
    for name, value in (("_noted", {}), ("_allowed", set()), ("_everything", False)):
        monkeypatch.setattr(trust, name, value)
    trust.check(code)  # no file names it
    trust.note({"setting": [text]}, "foreign.yaml")
    with pytest.raises(UserError, match=r"^foreign\.yaml names code"):
        trust.check(code)
    trust.allow([text])
    trust.check(code)


@pytest.mark.parametrize("name", ["foreign.pyc", "foreign.so"])
def test_compiled_code_is_not_loaded(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"loss file .*{name} is no \.py file"):
        load_file(tmp_path / name, "loss")
