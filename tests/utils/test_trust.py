"""Which code that a file names is refused, however the file writes it."""

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


def test_a_run_says_when_other_commands_need_the_flag(monkeypatch):
    monkeypatch.setattr(trust, "_asked", set())
    settings = {"task": "t", "policy": {"trust_remote_code": False}, "rollout": {"a": "./server"}}
    url = {**settings, "task_options": {"environment": {"url": "http://a:1"}}}
    assert trust.get_flag(url) == trust.get_flag(settings) == ""
    trust.check("http://a:1", "a server that gets the rows")
    trust.check("./server")  # of rollouts, which no other command starts
    assert (trust.get_flag(url), trust.get_flag(settings)) == (" --trust-code", "")
    assert trust.get_flag({**settings, "task": "my_task.py:Mine"}) == " --trust-code"
    assert trust.get_flag({**settings, "policy": {"trust_remote_code": True}}) == " --trust-code"


@pytest.mark.parametrize("name", ["foreign.pyc", "foreign.so"])
def test_compiled_code_is_not_loaded(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"loss file .*{name} is no \.py file"):
        load_file(tmp_path / name, "loss")
