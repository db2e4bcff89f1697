"""What settings need of each other: the rows of ``requirements.yaml``."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COMPARISON = re.compile(r"(\S+) ([=!<>]=|[<>]) (\S+)")
_UNARY = re.compile(r"(not )?(changed |given )?(\S+)")
_CONSTANTS = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Requirement:
    """A combination of settings that is refused, or noted; ``requirements.yaml`` has the grammar
    and explains each field."""

    say: str
    when: str | Sequence[str] = ()
    each: str = ""
    of: str = ""

    @property
    def text(self) -> str:
        """What is wrong and the remedy, with ``…`` for values."""
        items = ", ".join(self.each.split()) or "…"
        return re.sub(r"\{.*?\}", "…", self.say.replace("{item}", items))

    def find(self, block: Any) -> Iterator[str]:
        conditions = [self.when] if isinstance(self.when, str) else self.when
        if conditions and not any(_holds(condition, block) for condition in conditions):
            return
        if self.of:
            for item in get(block, self.of):
                yield self.say.format_map(_Values(block, item=item))
        elif self.each:
            for key in filter(lambda key: _is_changed(block, key), self.each.split()):
                owner, name = _split(block, key)
                default = type(owner).model_fields[name].default
                yield self.say.format_map(_Values(block, item=key, default=default))
        else:
            yield self.say.format_map(_Values(block))


class _Values(dict[str, Any]):
    def __init__(self, block: Any, **others: Any) -> None:
        super().__init__(others)
        self._block = block

    def __missing__(self, key: str) -> Any:
        value = getattr(self._block, key)
        return list(value) if isinstance(value, tuple) else value


@cache
def _read_table() -> dict[str, list[Requirement]]:
    text = (resources.files("vlm_grpo.config") / "requirements.yaml").read_text("utf-8")
    table = yaml.safe_load(text).items()
    return {block: [Requirement(**row) for row in rows] for block, rows in table}


def get_requirements(block: str) -> Sequence[Requirement]:
    """Return the rows of a class of settings by its name, or those of ``Notes``."""
    return _read_table().get(block, ())


def find_problems(block: Any) -> list[str]:
    # a class of a user's method may have the name of one of the library's
    is_own = type(block).__module__.startswith("vlm_grpo.")
    rows = get_requirements(type(block).__name__) if is_own else ()
    return list(dict.fromkeys(problem for row in rows for problem in row.find(block)))


def list_notes(settings: Any) -> list[str]:
    """Return what is biased or has no effect in a run's settings, one sentence each."""
    return [note for row in get_requirements("Notes") for note in row.find(settings)]


def get(block: Any, key: str) -> Any:
    """Return the value of a dotted key; None inside a block that is None."""
    for name in key.split("."):
        if isinstance(block, Mapping):
            block = block.get(name)
        elif block is not None:
            block = getattr(block, name)
    return block


def _holds(condition: str, block: Any) -> bool:
    return all(_holds_alone(clause, block) for clause in condition.split(" and "))


def _holds_alone(clause: str, block: Any) -> bool:
    if match := _COMPARISON.fullmatch(clause):
        key, sign, text = match.groups()
        value = get(block, key)
        if sign in _COMPARE:
            other = float(text) if text.isdigit() else get(block, text)
            are_numbers = isinstance(value, int | float) and isinstance(other, int | float)
            return are_numbers and _COMPARE[sign](value, other)
        found = any(_is_same(value, word) for word in text.split("|"))
        return found == (sign == "==")
    match = _UNARY.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no condition of settings")
    negation, question, keys = match.groups()
    test = {"changed ": _is_changed, "given ": _is_given, None: get}[question]
    return any(test(block, key) for key in keys.split("|")) != bool(negation)


def _is_same(value: Any, word: str) -> bool:
    if word in _CONSTANTS:
        return value is _CONSTANTS[word]
    return value == (int(word) if word.isdigit() else word)


def _split(block: Any, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return (get(block, parent) if parent else block), name


def _is_changed(block: Any, key: str) -> bool:
    owner, name = _split(block, key)
    return owner is not None and getattr(owner, name) != type(owner).model_fields[name].default


def _is_given(block: Any, key: str) -> bool:
    owner, name = _split(block, key)
    return owner is not None and name in owner.model_fields_set
