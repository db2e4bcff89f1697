"""The names of tasks in settings, and their options."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from vlm_grpo.task.task import Task

BUILT_IN = "vlm_grpo.tasks"
"""The package of the built-in tasks, and the entry point group of tasks in other packages."""
IN_SESSION = "<class "
"""Start of the text that replaces, in saved settings, a class that no other process can load."""
SET_BY_LIBRARY = ("frame", "thinking_tags", "progress", "token_limit")
"""Attributes of a task that are not options of a run."""


def get_task_name(task: Any) -> str:
    """Return the name by which ``load_task`` finds a task in another process.

    Of a class, it is a built-in task's name, ``package.module:Class`` or ``file.py:Class``; or
    ``<class Name>`` for a class of a function or of an interactive session, which no other process
    can load. Anything else is a name already.
    """
    if not isinstance(task, type):
        return str(task)
    module, name = sys.modules.get(task.__module__), task.__qualname__
    if getattr(getattr(module, name, None), "__qualname__", None) != name:
        return f"{IN_SESSION}{name}>"
    spec = getattr(module, "__spec__", None)
    path = task.__module__ if spec is None else spec.name  # not "__main__" under python -m
    package, _, last = path.rpartition(".")
    if package == BUILT_IN:
        return last
    if package:
        return f"{path}:{name}"
    file = getattr(module, "__file__", None)
    return f"{IN_SESSION}{name}>" if file is None else f"{file}:{name}"


def get_short_name(task: Any) -> str:
    """Return the name of a task's class, in lower case, or of its file, for folders and tags."""
    if isinstance(task, Task):
        task = type(task)
    if isinstance(task, type):
        return task.__name__.strip("_").lower()
    name = str(task)
    if name.startswith(IN_SESSION):
        return name[len(IN_SESSION) : -1].rpartition(".")[2].lower()
    module, _, class_name = name.rpartition(":")
    return class_name.lower() if module and not module.endswith(".py") else Path(name).stem


def get_options(task: Task) -> dict[str, Any]:
    """Return the options of a task that differ from their defaults."""
    found = {}
    for field in dataclasses.fields(task):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(task, field.name)
        if field.init and value != default and field.name not in SET_BY_LIBRARY:
            found[field.name] = value
    return found
