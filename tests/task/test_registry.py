"""Tasks by name, file and entry point, with real files and package metadata; names in settings."""

import importlib
import sys
from typing import Any

import pytest
from dataset_files import write_files

from vlm_grpo.errors import UserError
from vlm_grpo.task import registry
from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.task.registry import get_task_name, load_task, load_task_class
from vlm_grpo.tasks.counting import Counting

PARITY = '''
from __future__ import annotations

from dataclasses import field

from vlm_grpo.task import Task, reward


class Parity(Task):
    """Is the number odd or even?"""

    primary_metric = "right"
    lenient: bool = False
    words: tuple[str, ...] = ("odd", "even")
    share: float = 0.5
    total: float = field(init=False, default=1.0)

    def parse(self, text, example):
        return text if text in self.words else None

    def write(self, answer, example):
        return answer

    @reward(weight=2.0)
    def right(self, answer, example):
        return float(answer == example.answer)
'''
EMPTY = "from vlm_grpo.task import Task\nclass Empty(Task):\n    primary_metric = 'x'\n"
FIELD = "    lenient: bool = False"
BUILD = f"{PARITY}\n    def __post_init__(self):\n        raise "
ITSELF = f"{PARITY}\n\nfrom vlm_grpo import load_task\nload_task(__file__)\n"
OTHER_TYPE = "task must be a name, a path, a subclass of Task or a task"


@pytest.fixture
def parity(tmp_path):
    return write_files(tmp_path, {"parity.py": PARITY}) / "parity.py"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with a task as an entry point, in the layout of pip."""

    def _install(package: str, name: str, module_text: str = PARITY, value: str = ":Parity"):
        folder, points = f"{package}-1.0.dist-info", f"[vlm_grpo.tasks]\n{name} = {package}{value}"
        files = {f"{package}.py": module_text, f"{folder}/entry_points.txt": points}
        files[f"{folder}/METADATA"] = f"Name: {package}\nVersion: 1.0\n"
        monkeypatch.syspath_prepend(write_files(tmp_path / f"site-{package}", files))

    return _install


def get_error(name: Any, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load_task(name, **options)
    return str(caught.value)


def test_one_of_several_tasks_in_a_file_is_selected_by_name(parity):
    hidden = "\n\nclass _Hidden(Parity):\n    pass\n"
    parity.write_text(PARITY + hidden)
    # A class with an underscore is loaded only by its name.
    assert load_task_class(str(parity)).__name__ == "Parity"
    found = load_task_class(f"{parity}:_Hidden")
    assert load_task_class(get_task_name(found)).__name__ == "_Hidden"
    parity.write_text(PARITY + hidden.replace("_Hidden", "Other"))
    assert "defines 2 task classes" in get_error(str(parity))
    assert load_task_class(f"{parity}:Other").__name__ == "Other"
    assert "no task class Othr (did you mean Other?)" in get_error(f"{parity}:Othr")


def test_options_are_the_fields_that_the_constructor_takes(parity):
    task_class: Any = load_task_class(str(parity))
    task = load_task(task_class, lenient=True, tags=True)
    changed = load_task(task, lenient=False, share=0.25)
    assert vars(task) == vars(task_class(lenient=True, tags=True))
    assert vars(changed) == vars(task_class(tags=True, share=0.25))
    assert registry.get_options(changed) == {"tags": True, "share": 0.25}
    for name in ("lenientt", "total"):
        with pytest.raises(UserError, match=f"unknown option {name}"):
            load_task(task, **{name: 2.0})


def test_a_wrong_task_file_is_reported_and_an_interrupted_one_interrupts(parity, monkeypatch):
    # Else Python takes a file of the same second and the same size for the one before.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    parity.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_task(parity)
    for text, expected in (
        ("import math\nmath.nothing\n", ["line 2: AttributeError"]),
        ("def (:\n", ["cannot be loaded: SyntaxError"]),
        ("raise SystemExit\n", ["cannot be loaded: line 1: SystemExit"]),
        ("from vlm_grpo.task import Task\n", ["defines 0 task classes"]),
        (EMPTY, ["no method parse", "no method write", "@reward", "primary_metric = 'x'"]),
        (PARITY.replace("def right", "def read"), ["line 9: TypeError: Parity.read: the base cla"]),
        (ITSELF, ['under if __name__ == "__main__"']),
        (BUILD + "KeyError('a')", ["cannot be built: KeyError: 'a'"]),
        (BUILD + "SystemExit(3)", ["cannot be built: SystemExit: 3"]),
        (PARITY.replace(FIELD, "    tags: str = 'no'"), ["it declares the option tags"]),
        (PARITY.replace(FIELD, "    more: Wrods = ()"), ["the type of an option cannot be read"]),
    ):
        parity.write_text(text)
        message = get_error(str(parity))
        assert str(parity) in message
        for part in expected:
            assert part in message


def test_a_wrong_name_or_option_is_named():
    for name, options, expected in (
        *((other, {}, OTHER_TYPE) for other in (None, 3, {"task": "counting"}, int)),
        ("vlm_grpo.tasks.counting:Pariti", {}, "no task class Pariti"),
        ("no.module:Parity", {}, "no.module:Parity cannot be loaded"),
        ("no.module:Parity", {}, "put its folder on PYTHONPATH"),
        ("none.py", {}, "no task file"),
        ("~no-such-user/task.py", {}, "there is no task file ~no-such-user/task.py"),
        ("countin", {}, f"counting?): give one of {', '.join(registry.task_names())}, or"),
        ("counting", {"tag": True, "thinking": 3}, "tag (did you mean tags?)\n  - thinking=3"),
        ("counting", {"tags": "yes"}, "tags='yes' should be true or false"),
        ("counting", {"weights": {"exact": "much"}}, "should be a list or be a number"),
        ("counting", {"frame": "permille"}, "frame='permille' should"),
        ("counting", {"weights": {"exactly": 1.0}}, "no reward exactly"),
    ):
        message = get_error(name, **options)
        assert expected in message
        assert ", frame" not in message.partition("it has ")[2]  # nor another that the library sets


def test_a_file_may_change_defaults_or_have_none_and_takes_whole_numbers_for_floats(parity):
    assert vars(load_task(parity)) == vars(load_task(str(parity)))
    assert load_task(str(parity), share=1).share == 1.0  # type: ignore[attr-defined]
    assert load_task("grounding", frame=PERMILLE).frame is PERMILLE
    parity.write_text(PARITY.replace(FIELD, "    tags: bool = True"))
    assert load_task(str(parity)).tags
    parity.write_text(PARITY.replace(FIELD, "    lenient: bool"))
    assert "task_options.lenient has no value: set task_options.lenient=…" in get_error(str(parity))
    assert not load_task(str(parity), lenient=False).tags


@pytest.mark.parametrize("value", [":Parity", ""])
def test_a_task_of_another_package_is_found_by_its_entry_point(install, value):
    install(f"parity_package_{len(value)}", "parity", value=value)
    assert "parity" in registry.task_names()
    assert type(load_task("parity")).__name__ == "Parity"


def test_a_name_that_is_claimed_twice_is_refused(install):
    install("parity_clash", "counting")
    install("parity_one", "parity")
    install("parity_two", "parity")
    for name, packages in (("counting", ["parity_clash"]), ("parity", ["parity_one", "_two"])):
        message = get_error(name)
        assert "claimed more than once" in message
        assert all(package in message for package in packages)
    assert type(load_task("ocr")).__name__ == "OCR"  # other names still work


def test_a_broken_package_is_named(install):
    texts = {"import no_such_module_anywhere\n": "parity_broken_0"}
    texts |= {"Parity = 3\n": "not a subclass of Task but 3"}
    for number, (text, expected) in enumerate(texts.items()):
        install(f"parity_broken_{number}", f"parity_{number}", module_text=text)
        assert expected in get_error(f"parity_{number}")


def test_a_class_is_named_by_its_import_path_or_that_of_its_file(tmp_path, monkeypatch):
    files = {"zoo/__init__.py": "", "zoo/parity.py": PARITY, "parity_file.py": PARITY}
    write_files(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("zoo.parity").Parity
    assert get_task_name(task) == "zoo.parity:Parity"
    assert load_task_class("zoo.parity:Parity") is task
    assert get_task_name(Counting) == "counting"
    imported = importlib.import_module("parity_file").Parity
    loaded = load_task_class(str(tmp_path / "parity_file.py"))
    for task in (imported, loaded):
        assert get_task_name(task) == f"{tmp_path / 'parity_file.py'}:Parity"
        assert vars(load_task(get_task_name(task), words=["a"]))["words"] == ("a",)
    del sys.modules["parity_file"]


def test_the_short_name_is_that_of_the_class_or_file():
    for task, name in (
        *((Counting, "counting"), (Counting(), "counting"), ("counting", "counting")),
        *(("tasks/clock.py", "clock"), ("tasks/clock.py:Hands", "clock")),
        *(("zoo.clock:Hands", "hands"), ("<class test.<locals>.Hands>", "hands")),
    ):
        assert registry.get_short_name(task) == name
