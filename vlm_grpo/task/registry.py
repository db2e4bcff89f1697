"""Lookup of tasks by name, file, entry point or class; their names in settings, their options.

A task comes from this package, from a user's ``.py`` file or Python module, or from an installed
package that lists it under the entry point group ``vlm_grpo.tasks``.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from vlm_grpo.errors import UserError, bullets, nearest, simplify
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.adapter import Adapted, Rewarding
from vlm_grpo.task.coordinates import ORIGINAL
from vlm_grpo.task.environment import Environment
from vlm_grpo.task.rewards import stay_in_folder
from vlm_grpo.utils import trust

Built = TypeVar("Built")

TOOLS = "vlm_grpo.environments"  # the package of the built-in environments
BUILT_IN = "vlm_grpo.tasks"
"""The package of the built-in tasks, and the entry point group of tasks in other packages."""
IN_SESSION = "<class "
"""Start of the text that replaces, in saved settings, a class that no other process can load."""
SET_BY_LIBRARY = ("frame", "thinking_tags", "progress", "token_limit")
"""Attributes of a task that are not options of a run."""
_FILE_MODULE = "_vlm_grpo_task_"  # Prefix of the module name of a task's file
_LOADING: dict[str, str] = {}  # Names of the modules that are being loaded, and their files


def task_names() -> list[str]:
    """Return the names of all built-in tasks and of those in other packages."""
    return sorted(_list_claims())


def load_task(task: str | Path | type[Task] | Task, /, **options: Any) -> Task:
    """Load a task.

    Args:
        task: a name in ``task_names()``, the path of a ``.py`` file that defines one task
            (``file.py:ClassName`` if it defines several), ``package.module:ClassName``, a class,
            or a task, whose options ``options`` override.
        options: the task's own options, such as ``tags=True`` or ``weights={"exact": 2.0}``.

    Raises:
        UserError: the task does not exist, two packages claim its name, its code fails, or an
            option is unknown or of a wrong type.
    """
    if isinstance(task, Task):
        fields = (field.name for field in dataclasses.fields(task) if field.init)
        own = {name: getattr(task, name) for name in fields}
        task, options = type(task), {**own, **options}
    return build_task(load_task_class(task), get_task_name(task), options)


def check_trainable(task: Task) -> Task:
    """Return the task; raise a ``UserError`` if no reward has a weight: nothing is learned."""
    scheduled = (value for w in task.weights.values() if isinstance(w, list) for _, value in w)
    if not any([*task.reward_weights().values(), *scheduled]):
        names = ", ".join(task.reward_weights())
        raise UserError(f"no reward has a weight: set task_options.weights, a mapping of {names}")
    return task


def load_environment(environment: Any) -> Environment:
    """Load an environment.

    ``environment`` is the name of a built-in one, the path of a ``.py`` file that defines one
    (``file.py:ClassName`` if it defines several), a mapping of such a ``name`` and its options, a
    subclass of ``Environment``, or an environment. ``UserError``: as for ``load_task``.
    """
    if isinstance(environment, Environment):
        return environment
    options = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
    name = options.pop("name", None)
    if isinstance(name, type) and issubclass(name, Environment):
        return build_object(name, name.__name__, options)
    if not isinstance(name, str | Path):
        raise UserError(f"environment must be a name or a path, perhaps with options, not {name!r}")
    name = str(name)
    path, _, class_name = name.partition(".py:")
    modules = pkgutil.iter_modules(importlib.import_module(TOOLS).__path__)
    names = [module.name for module in modules if not module.ispkg]
    if name.endswith(".py") or class_name:
        module = load_file(Path(f"{path}.py" if class_name else path), "environment")
    elif name in names:
        module = importlib.import_module(f"{TOOLS}.{name}")
    else:
        raise UserError(
            f"there is no environment {name!r}{nearest(name, names)}: "
            f"give one of {', '.join(names)}, or the path of a .py file"
        )
    member: Any = getattr(module, class_name, None)
    is_foreign = isinstance(member, type) and not issubclass(member, Environment)
    if is_foreign and hasattr(member, "reset"):
        found = Rewarding if hasattr(member, "get_reward") else Adapted
        options["factory"] = member
    else:
        found = _find_class(module, name, class_name, Environment)
    built = build_object(found, name, options)
    try:
        tools = [known.describe(ORIGINAL, (1, 1)) for known in built.tools.values()]
    except FAILURES as error:  # a hint may be any expression
        raise UserError(
            f"environment {name}: a tool's argument has a wrong hint: {error}"
        ) from error
    if not tools:
        raise UserError(f"environment {name} has no method that is marked @tool")
    return built


def load_task_class(task: str | Path | type[Task]) -> type[Task]:
    """Return the class of a task; arguments and errors are those of ``load_task``."""
    if isinstance(task, type) and issubclass(task, Task):
        return _check_class(task, get_task_name(task))
    if not isinstance(task, str | Path):
        raise UserError(f"task must be a name, a path, a subclass of Task or a task, not {task!r}")
    task = str(task)
    path, _, class_name = task.partition(".py:")
    if task.endswith(".py") or class_name:
        file = Path(f"{path}.py" if class_name else path)
        return _find_task(load_file(file), task, class_name)
    if task.startswith(IN_SESSION) or task == "python":
        raise UserError(
            f"task={task}: this task is an argument of the Python program that wrote the settings: "
            "give it, as train(settings, task=…), or save it in a .py file and give its path"
        )
    if ":" in task:
        module, _, class_name = task.partition(":")
        remedy = (
            ": install the package, put its folder on PYTHONPATH, or give the path of the task's "
            ".py file"
        )
        trust.check(task)
        found = _load(lambda: importlib.import_module(module), task, remedy)
        return _find_task(found, module, class_name)
    claims = _list_claims().get(task, {})
    if len(claims) > 1:
        raise UserError(
            f"task name {task!r} is claimed more than once:\n{bullets(claims)}\n"
            "rename or uninstall one of them, or give the path of the task's file"
        )
    if claims:
        origin, point = next(iter(claims.items()))
        source = f"{task} ({origin})"
        return _find_task(_load(point.load, source), source)
    names = task_names()
    raise UserError(
        f"there is no task {task!r}{nearest(task, names)}: "
        f"give one of {', '.join(names)}, or the path of a .py file"
    )


def get_file(kind: type) -> str | None:
    """Return the user's file that another process must load before it unpickles an object."""
    return inspect.getfile(kind) if kind.__module__.startswith(_FILE_MODULE) else None


def build_task(task: type[Task], name: str, options: dict[str, Any]) -> Task:
    """Build a task with its options; the ``UserError`` names all that are wrong or missing."""
    if options.get("environment") is not None:
        options = {**options, "environment": load_environment(options["environment"])}
    return build_object(task, name, options)


def build_object(kind: type[Built], name: str, options: dict[str, Any]) -> Built:
    """Build a task or an environment with its options, as ``build_task``."""
    noun = _get_noun(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    prefix = "task_options" if noun == "task" else "task_options.environment"
    known = {field.name: hints[field.name] for field in fields}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option, value in options.items():
        if option not in known:
            problems.append(f"unknown option {option}{nearest(option, known)}")
            continue
        try:
            values[option] = _convert(value, known[option])
        except ValidationError as error:
            reasons = {simplify(problem["msg"]) for problem in error.errors()}
            problems.append(f"{option}={value!r} should {' or '.join(sorted(reasons))}")
    problems += [
        f"{prefix}.{field.name} has no value: set {prefix}.{field.name}=…"
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
        and field.name not in options
    ]
    if problems:
        raise UserError(
            f"{noun} {name} has wrong options:\n{bullets(problems)}\n"
            f"it has {', '.join(option for option in known if option not in SET_BY_LIBRARY)}"
        )
    try:
        with stay_in_folder():
            return kind(**values)
    except (ValueError, UserError) as error:
        raise UserError(f"{noun} {name}: {error}") from error
    except FAILURES as error:  # the user's constructor may raise anything
        message = f"{noun} {name} cannot be built: {type(error).__name__}: {error}"
        raise UserError(message) from error


def _convert(value: Any, hint: Any) -> Any:
    """Return the value as the annotated type; text is not converted to numbers or booleans."""
    config = ConfigDict(arbitrary_types_allowed=True)
    try:
        adapter = TypeAdapter(hint, config=config)
    except PydanticUserError:  # a type with its own configuration accepts no other
        adapter = TypeAdapter(hint)
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        value = tuple(value)  # YAML has no tuples
    return adapter.validate_python(value, strict=True)


def _load(load: Callable[[], Any], source: str, remedy: str = "") -> Any:
    try:
        return load()
    except FAILURES as error:  # the code of users and other packages may raise anything
        raise UserError(
            f"task {source} cannot be loaded: {type(error).__name__}: {error}{remedy}"
        ) from error


def _find_task(module: Any, source: str, class_name: str = "") -> type[Task]:
    """Return a task class, or that which a module defines."""
    is_task = isinstance(module, type) and issubclass(module, Task)
    found: Any = module if is_task else _find_class(module, source, class_name)
    return _check_class(found, source)


def _get_noun(kind: type) -> str:
    return "task" if issubclass(kind, Task) else "environment"


def _find_class(module: Any, source: str, class_name: str = "", base: type = Task) -> Any:
    """Return the class of a kind that a module defines; imported classes do not count.

    A class whose name starts with an underscore counts only if ``class_name`` names it.
    """
    noun = _get_noun(base)
    if not isinstance(module, ModuleType):
        raise UserError(f"{noun} {source} is not a subclass of {base.__name__} but {module!r}")
    found = {
        name: member
        for name, member in vars(module).items()
        if inspect.isclass(member)
        and issubclass(member, base)
        and member.__module__ == module.__name__
        and (name == class_name or not name.startswith("_"))
    }
    if class_name:
        if class_name not in found:
            raise UserError(
                f"{source}: there is no {noun} class {class_name}{nearest(class_name, found)}; "
                f'it defines {", ".join(found) or "none"}, apart from if __name__ == "__main__"'
            )
        return found[class_name]
    if len(found) != 1:
        remedy = (
            f"choose one, as in {source}:{next(iter(found))}"
            if found
            else f"define one: class Mine({base.__name__}), see those of this package"
        )
        raise UserError(f"{source} defines {len(found)} {noun} classes, not one: {remedy}")
    return next(iter(found.values()))


def _check_class(task: type[Task], source: str) -> type[Task]:
    problems = [
        f"it defines no method {name}"
        for name in ("parse", "write")
        if getattr(task, name) is getattr(Task, name)
    ]
    try:
        hints = typing.get_type_hints(task)
    except FAILURES as error:  # an annotation may be any expression
        raise UserError(f"task {source}: the type of an option cannot be read: {error}") from error
    own_types = typing.get_type_hints(Task)
    problems += [
        f"it declares the option {field.name}, which every task has, with another type"
        for field in dataclasses.fields(Task)
        if hints[field.name] != own_types[field.name]
    ]
    if not task.rules("reward"):
        problems.append("no method is marked @reward")
    rules = {**task.rules("reward"), **task.rules("metric")}
    if (primary_metric := getattr(task, "primary_metric", None)) not in rules:
        problems.append(
            f"primary_metric = {primary_metric!r} is not one of its rewards and metrics: "
            f"{', '.join(rules) or 'it has none'}"
        )
    if problems:
        raise UserError(f"task {source} ({task.__name__}) is incomplete:\n{bullets(problems)}")
    return task


def load_file(path: Path, kind: str = "task") -> ModuleType:
    """Load a user's Python file of a ``kind``, for messages; raise a ``UserError`` if it fails.

    The file of the program that runs is not run again."""
    path = Path(os.path.expanduser(path))  # Path's own raises for an unknown user
    if not path.is_file():
        raise UserError(f"there is no {kind} file {path}")
    if path.suffix != ".py":  # nor compiled code, which nobody can read
        raise UserError(f"{kind} file {path} is no .py file")
    program = sys.modules["__main__"]
    if path.resolve() == Path(getattr(program, "__file__", None) or os.devnull).resolve():
        return program
    trust.check(path)
    # The path is part of the name, so that two files called task.py do not collide; so is the
    # content: objects of an unchanged file that is loaded again have the same classes.
    content = str(path.resolve()).encode() + b"\0" + path.read_bytes()
    name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(content).hexdigest()[:12]}"
    if name in sys.modules and name not in _LOADING:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"{kind} file {path} cannot be loaded")
    if name in _LOADING:
        refuse_while_loading()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    _LOADING[name] = f"{kind} file {path}"
    try:
        with stay_in_folder():
            spec.loader.exec_module(module)
    except FAILURES as error:  # the user's file may raise anything
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"line {f.lineno}: " for f in frames if f.filename == str(path.resolve())]
        message = f"{''.join(lines[-1:])}{type(error).__name__}: {error}"
        raise UserError(f"{kind} file {path} cannot be loaded: {message}") from error
    finally:
        del _LOADING[name]
    return module


def refuse_while_loading() -> None:
    """Raise a ``UserError`` if a user's file that is being loaded calls this."""
    if _LOADING:
        raise UserError(
            f"{[*_LOADING.values()][-1]} is a program too, which would run whenever it is loaded: "
            'put that part under if __name__ == "__main__"'
        )


def _list_claims() -> dict[str, dict[str, EntryPoint]]:
    """Return by name the tasks of this and of other packages, each by where it comes from."""
    folders = [path or "." for path in sys.path]
    return _read_claims(tuple((f, os.stat(f).st_mtime_ns) for f in folders if os.path.exists(f)))


@lru_cache(maxsize=1)
def _read_claims(folders: tuple[tuple[str, int], ...]) -> dict[str, dict[str, EntryPoint]]:
    claims: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=BUILT_IN):  # reading the metadata of all packages takes 10 ms
        package = f"package {point.dist.name}" if point.dist else "an unnamed package"
        claims.setdefault(point.name, {})[f"{point.value} of {package}"] = point
    for module in pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__):
        if not (module.ispkg or module.name.startswith("_")):
            point = EntryPoint(module.name, f"{BUILT_IN}.{module.name}", BUILT_IN)
            claims.setdefault(module.name, {})["the task of vlm_grpo itself"] = point
    return claims


def get_task_name(task: Any) -> str:
    """Return the name by which ``load_task`` finds a task in another process.

    Of a class, it is a built-in task's name, ``package.module:Class``, ``file.py:Class``, or
    ``<class Name>`` for a class that no other process can load. Anything else is a name already.
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
