"""Find tasks by name, file or entry point, and load them with checked options.

A task comes from this package, from a ``.py`` file of the user's, or from another installed
package that names it under the entry point group ``vlm_grpo.tasks``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
import typing
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from vlm_grpo.config.base import plain
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.task import Task

GROUP = "vlm_grpo.tasks"
"""The entry point group, and also the package that holds the built-in tasks."""
_FILE_MODULE = "_vlm_grpo_task_"
"""How the module of a task's file is named, before the file's name."""


def task_names() -> list[str]:
    """Every name that ``load_task`` knows, built-in tasks and those of other packages."""
    return sorted(_built_in() | _plugins().keys())


def load_task(name_or_path: str, /, **options: Any) -> Task:
    """A task, ready to score.

    Args:
        name_or_path: a name in ``task_names()``, or the path of a ``.py`` file that defines one
            task (``file.py:ClassName`` where it defines several).
        options: the task's own options, such as ``tags=True`` or ``weights={"exact": 2.0}``.

    Raises:
        UserError: there is no such task, two packages claim its name, its file does not load,
            or an option is unknown or of a wrong type.
    """
    return build_task(load_task_class(name_or_path), name_or_path, options)


def load_task_class(name_or_path: str) -> type[Task]:
    """The class of a task; arguments and errors as for ``load_task``."""
    path, _, class_name = name_or_path.partition(".py:")
    if name_or_path.endswith(".py") or class_name:
        file = Path(f"{path}.py" if class_name else path)
        return _the_task(_module_from_file(file), name_or_path, class_name)
    plugins = _plugins().get(name_or_path, [])
    built_in = name_or_path in _built_in()
    if len(plugins) + built_in > 1:
        claims = [f"{plugin.value} of {_package(plugin)}" for plugin in plugins]
        claims += ["the task of vlm_grpo itself"] if built_in else []
        raise UserError(
            f"task name {name_or_path!r} is claimed more than once:\n{bullets(claims)}\n"
            "rename or uninstall one of them, or give the path of the task's file"
        )
    if built_in:
        return _the_task(importlib.import_module(f"{GROUP}.{name_or_path}"), name_or_path)
    if plugins:
        return _from_plugin(plugins[0])
    names = task_names()
    raise UserError(
        f"there is no task {name_or_path!r}{nearest(name_or_path, names)}: "
        f"give one of {', '.join(names)}, or the path of a .py file"
    )


def task_source(task: type[Task]) -> str | None:
    """By what ``load_task_class`` finds the class in another process; None: Python imports it."""
    if not task.__module__.startswith(_FILE_MODULE):
        return None
    return f"{inspect.getfile(task)}:{task.__name__}"


def build_task(task: type[Task], name: str, options: dict[str, Any]) -> Task:
    """The task with its options.

    Raises:
        UserError: options are unknown or of a wrong type; every one is named.
    """
    hints = typing.get_type_hints(task)
    known = {field.name: hints[field.name] for field in dataclasses.fields(task)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option, value in options.items():
        if option not in known:
            problems.append(f"unknown option {option}{nearest(option, known)}")
            continue
        try:
            values[option] = _convert(value, known[option])
        except ValidationError as error:
            reasons = {plain(problem["msg"]) for problem in error.errors()}
            problems.append(f"{option}={value!r} should {' or '.join(sorted(reasons))}")
    if problems:
        raise UserError(
            f"task {name} has wrong options:\n{bullets(problems)}\nit has {', '.join(known)}"
        )
    try:
        return task(**values)
    except ValueError as error:
        raise UserError(f"task {name}: {error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """The value as the annotated type; no text is taken for a number or a truth value."""
    config = ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter = TypeAdapter(hint, config=config)
    except PydanticUserError:  # a type with a configuration of its own takes no other
        adapter = TypeAdapter(hint)
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        value = tuple(value)  # YAML has no tuples
    return adapter.validate_python(value, strict=True)


def _the_task(module: ModuleType, source: str, class_name: str = "") -> type[Task]:
    """The task class that a module defines (imported ones do not count)."""
    found = {
        name: member
        for name, member in vars(module).items()
        if inspect.isclass(member)
        and issubclass(member, Task)
        and member.__module__ == module.__name__
        and not name.startswith("_")
    }
    if class_name:
        if class_name not in found:
            raise UserError(
                f"{source}: there is no task class {class_name}{nearest(class_name, found)}; "
                f"the file defines {', '.join(found) or 'none'}"
            )
        return _checked(found[class_name], source)
    if len(found) != 1:
        remedy = (
            f"say which by {source}:{next(iter(found))}"
            if found
            else "define one: class MyTask(Task), see the tasks of this package"
        )
        raise UserError(f"{source} defines {len(found)} task classes, not one: {remedy}")
    return _checked(next(iter(found.values())), source)


def _checked(task: type[Task], source: str) -> type[Task]:
    """The class itself, if it has what every task needs."""
    rules = {**task.rules("reward"), **task.rules("metric")}
    primary_metric = getattr(task, "primary_metric", None)
    problems = [
        f"it defines no method {name}"
        for name in ("parse", "write")
        if getattr(task, name) is getattr(Task, name)
    ]
    if not task.rules("reward"):
        problems.append("no method is marked @reward")
    if primary_metric not in rules:
        problems.append(
            f"primary_metric = {primary_metric!r} names none of its rewards and metrics: "
            f"{', '.join(rules) or 'it has none'}"
        )
    if problems:
        raise UserError(f"task {source} ({task.__name__}) is incomplete:\n{bullets(problems)}")
    return task


def _module_from_file(path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"there is no task file {path}")
    # The name is made from the path, so that two files called task.py do not collide.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"{_FILE_MODULE}{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"task file {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        del sys.modules[name]
        raise UserError(
            f"task file {path} cannot be loaded: {_blame(error, path.resolve())}"
        ) from error
    return module


def _blame(error: Exception, path: Path) -> str:
    """``line N: NameError: …`` where the error is of the task's own file."""
    what = f"{type(error).__name__}: {error}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"line {lines[-1]}: {what}" if lines else what


def _from_plugin(plugin: EntryPoint) -> type[Task]:
    source = f"{plugin.name} ({plugin.value} of {_package(plugin)})"
    try:
        found = plugin.load()
    except Exception as error:  # another package's code may raise anything
        raise UserError(
            f"task {source} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, ModuleType):
        return _the_task(found, source)
    if inspect.isclass(found) and issubclass(found, Task):
        return _checked(found, source)
    raise UserError(f"task {source} is no Task class but {found!r}")


def _built_in() -> set[str]:
    package = importlib.import_module(GROUP)
    return {
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    }


def _plugins() -> dict[str, list[EntryPoint]]:
    """Entry points by name; the same one listed twice by one package counts once."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, {})[(_package(point), point.value)] = point
    return {name: list(points.values()) for name, points in found.items()}


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist else "an unnamed package"
