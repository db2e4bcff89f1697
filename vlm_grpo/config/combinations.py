"""Combinations of settings that are refused or noted: the rows of ``combinations.yaml``."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import resources
from typing import Any

import yaml

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Add: operator.add, ast.Mod: operator.mod},
    **{ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items},
}


@dataclass(frozen=True)
class Combination:
    """A combination of settings that is refused, or noted; ``combinations.yaml`` has the grammar
    and explains each field."""

    say: str
    when: str = "True"
    each: str = ""
    of: str = ""

    @property
    def text(self) -> str:
        """What is wrong and the remedy, with ``…`` for values."""
        items = ", ".join(self.each.split()) or "…"
        return re.sub(r"\{.*?\}", "…", self.say.replace("{item}", items))

    def find(self, block: Any) -> Iterator[str]:
        functions = {"changed": partial(_is_changed, block), "given": partial(_is_given, block)}
        if not evaluate(parse(self.when), _Names(block, **functions)):
            return
        if self.of:
            for item in get(block, self.of):
                yield self.say.format_map(_Names(block, item=item))
        elif self.each:
            for key in filter(lambda key: _is_changed(block, key), self.each.split()):
                owner, name = _split(block, key)
                default = type(owner).model_fields[name].default
                yield self.say.format_map(_Names(block, item=key, default=default))
        else:
            yield self.say.format_map(_Names(block))


class _Names(dict[str, Any]):
    """The names in a row of a block: its settings, and others."""

    def __init__(self, block: Any, **others: Any) -> None:
        super().__init__(others)
        self._block = block

    def __missing__(self, key: str) -> Any:
        value = getattr(self._block, key)
        return list(value) if isinstance(value, tuple) else value


@cache
def _read_table() -> dict[str, list[Combination]]:
    text = (resources.files("vlm_grpo.config") / "combinations.yaml").read_text("utf-8")
    table = yaml.safe_load(text).items()
    return {block: [Combination(**row) for row in rows] for block, rows in table}


def get_combinations(block: str) -> Sequence[Combination]:
    """Return the rows of a class of settings by its name, or those of ``Notes``."""
    return _read_table().get(block, ())


def find_problems(block: Any) -> list[str]:
    # a class of a user's method may have the name of one of the library's
    is_own = type(block).__module__.startswith("vlm_grpo.")
    rows = get_combinations(type(block).__name__) if is_own else ()
    return list(dict.fromkeys(problem for row in rows for problem in row.find(block)))


def list_notes(settings: Any) -> list[str]:
    """Return what is biased or has no effect in a run's settings, one sentence each."""
    return [note for row in get_combinations("Notes") for note in row.find(settings)]


def get(block: Any, key: str) -> Any:
    """Return the value of a dotted key; None inside a block that is None."""
    for name in key.split("."):
        if isinstance(block, Mapping):
            block = block.get(name)
        elif block is not None:
            block = getattr(block, name)
    return block


@lru_cache(maxsize=512)
def parse(text: str) -> ast.expr:
    """Parse a condition in Python's syntax; ``ValueError``: it is none."""
    try:
        return ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no condition: {error}") from error


def evaluate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of a parsed condition, without running Python.

    A comparison of values that have no order does not hold. A call is that of a function for each
    of the keys that are its arguments; one that returns True suffices.
    """
    match node:
        case ast.BoolOp(op, parts):
            values = (evaluate(part, names) for part in parts)
            return all(values) if isinstance(op, ast.And) else any(values)
        case ast.UnaryOp(ast.Not(), part):
            return not evaluate(part, names)
        case ast.UnaryOp(ast.USub(), part):
            return -evaluate(part, names)
        case ast.Compare(first, signs, others):
            operands = [evaluate(part, names) for part in (first, *others)]
            pairs = zip(signs, operands, operands[1:], strict=False)
            with suppress(TypeError):
                return all(_OPERATORS[type(sign)](left, right) for sign, left, right in pairs)
            return False
        case ast.BinOp(left, sign, right):
            return _OPERATORS[type(sign)](evaluate(left, names), evaluate(right, names))
        case ast.Call(function, keys):
            return any(evaluate(function, names)(ast.unparse(key)) for key in keys)
        case ast.Attribute(owner, name):
            return get(evaluate(owner, names), name)
        case ast.Tuple(parts):
            return tuple(evaluate(part, names) for part in parts)
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
    raise ValueError(f"{ast.unparse(node)!r} is no condition")


def _split(block: Any, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return (get(block, parent) if parent else block), name


def _is_changed(block: Any, key: str) -> bool:
    owner, name = _split(block, key)
    return owner is not None and getattr(owner, name) != type(owner).model_fields[name].default


def _is_given(block: Any, key: str) -> bool:
    owner, name = _split(block, key)
    return owner is not None and name in owner.model_fields_set
