"""The base of all settings: frozen pydantic models, and readable validation errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vlm_grpo.config.combinations import find_problems
from vlm_grpo.config.other_trainers import find_other_setting, list_other_settings
from vlm_grpo.errors import UserError, bullets, find_nearest, nearest, simplify

GONE = "checkpoint.asynchronous"
"""A setting of 0.1.0 that changed no result."""


class _Explained(type(BaseModel)):
    """The class of settings' classes, whose calls name wrong settings as ``load_settings`` does."""

    if not TYPE_CHECKING:  # type checkers then take the arguments from the fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                problems = bullets(describe_problems(error, cls))
                raise UserError(f"{cls.__name__} has wrong settings:\n{problems}") from error


class Frozen(BaseModel, metaclass=_Explained):
    """A block of settings: immutable, without unknown keys, described by field docstrings.

    Raises:
        UserError: values given to the constructor are wrong; the message lists every problem.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := find_problems(self):
            raise ValueError("\n".join(problems))
        return self


class OnResume(Enum):
    """Whether a resumed run may change a setting: a mark of the setting or of a block around it."""

    FREE = "A resumed run may change it."
    SAME_ROWS = "A resumed run may change it if the training examples stay the same."
    LOCKED = ""


FREE, SAME_ROWS, LOCKED = OnResume


def find_on_resume(model: type[BaseModel], key: str) -> OnResume:
    """Return the mark of a setting, or else of the nearest block around it; by default, locked."""
    found, blocks = LOCKED, [model]
    for name in key.split("."):
        fields = [block.model_fields[name] for block in blocks if name in block.model_fields]
        marks = [mark for f in fields for mark in f.metadata if isinstance(mark, OnResume)]
        found = marks[0] if marks else found
        blocks = [block for field in fields for block in get_blocks(field.annotation)]
    return found


def known_keys(model: type[BaseModel], prefix: str = "", required: bool = False) -> Iterator[str]:
    """Yield every dotted key of a settings model, or every required one, blocks before fields."""
    for name, field in model.model_fields.items():
        if field.is_required() or not required:
            yield prefix + name
            for block in get_blocks(field.annotation):
                yield from known_keys(block, f"{prefix}{name}.", required)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key.

    >>> flatten({"optim": {"lr": 1e-6}, "seed": 0})
    {'optim.lr': 1e-06, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def merge(target: dict[str, Any], values: Mapping[str, Any], inside: str = "") -> None:
    """Update nested values in place by others with nested or dotted keys, or models as blocks.

    Dots in the keys of a mapping that is the value of a task's option have no meaning.

    >>> settings = {"optim": {"lr": 1e-6, "eps": 1e-8}}
    >>> merge(settings, {"optim.lr": 1e-5, "policy": {"lora": {}}})
    >>> settings
    {'optim': {'lr': 1e-05, 'eps': 1e-08}, 'policy': {'lora': {}}}
    """
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(f"key {key!r} of the settings must be text, not {type(key).__name__}")
        name, rest = key, ""
        if not inside.startswith("task_options."):
            name, _, rest = key.partition(".")
        if rest:
            value = {rest: value}
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, Mapping):
            held = target.get(name)
            target[name] = dict(held) if isinstance(held, Mapping) else {}
            merge(target[name], value, f"{inside}.{name}".lstrip("."))
        else:
            target[name] = value


def describe_missing(key: str) -> str:
    return f"{key} has no value: add {key}=… to the command or recipe"


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one line for each wrong key: its name, its value and the expected value."""
    expected: dict[str, list[str]] = {}
    keys = list(known_keys(model))
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    for problem in error.errors(include_url=False):
        key, siblings = _find_key(problem["loc"], model)
        if problem["type"] == "extra_forbidden":
            is_in_list = any(isinstance(part, int) for part in problem["loc"])
            texts = [f"unknown key {key}{suggest_key(key, siblings if is_in_list else keys)}"]
        elif problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
            count = problem["loc"][-1] + 1  # a list that is too short lacks each further item
            expected[head := f"{key}={_short(problem['input'])}"] = [f"have {count} items"]
            texts = [head]
        elif problem["type"] == "missing":
            # A missing block is reported by its required fields.
            inner = [k for k in known_keys(model, required=True) if k.startswith(f"{key}.")]
            texts = [describe_missing(k) for k in inner or [key]]
        elif problem["type"] == "value_error":
            texts = problem["msg"].removeprefix("Value error, ").split("\n")
            if key in leaves:
                texts = [f"{key}={_short(problem['input'])} {text}" for text in texts]
        else:
            texts = [f"{key}={_short(problem['input'])} should {simplify(problem['msg'])}"]
        # Each branch of a union reports its expectation for the key: join them with "or".
        for head, _, tail in (text.partition(" should ") for text in texts):
            tails = expected.setdefault(head, [])
            if tail and tail not in tails:
                tails.append(tail)
    return [
        f"{head} should {' or '.join(tails)}" if tails else head for head, tails in expected.items()
    ]


def _find_key(location: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str, Sequence[str]]:
    """Return the dotted key of a pydantic location, without the names of union branches, and, if it
    is unknown, the known keys of its block."""
    parts: list[str] = []
    siblings: list[str] = []
    blocks, items = [model], []
    for part in location:
        fields = [block.model_fields[part] for block in blocks if part in block.model_fields]
        if fields:
            blocks = [block for field in fields for block in get_blocks(field.annotation)]
            items = [block for field in fields for block in _get_items(field.annotation)]
            parts.append(str(part))
        elif items and isinstance(part, int):
            blocks, items = items, []
            parts.append(str(part))
        elif blocks and isinstance(part, str) and part not in {b.__name__ for b in blocks}:
            siblings = [".".join([*parts, name]) for block in blocks for name in block.model_fields]
            parts.append(part)
            blocks = []
    return ".".join(parts), siblings


def suggest_key(key: str, keys: Sequence[str]) -> str:
    """Return a hint at the known key that an unknown key probably means, or an empty string."""
    if (other := find_other_setting(key)) is not None:
        return f": {other}"
    block, _, last = key.rpartition(".")
    same_leaf = [known for known in keys if known.rpartition(".")[2] == last]
    if len(same_leaf) == 1:
        return f" (did you mean {same_leaf[0]}?)"
    # Names are compared without their blocks, which would make any two of a block alike.
    leaves = {known.rpartition(".")[2]: known for known in reversed(keys)}
    siblings = {leaf: known for leaf, known in leaves.items() if known.rpartition(".")[0] == block}
    least = 0.5 if len(last) <= 2 else 0.6  # "rl" and "lr" share one letter in order
    if leaf := find_nearest(last, siblings, least):
        return f" (did you mean {siblings[leaf]}?)"
    others = [setting.name.rpartition(".")[2] for setting in list_other_settings()]
    if name := find_nearest(last, others, least=0.85):
        return f": {find_other_setting(name)}"
    if block and siblings:
        return ""
    leaf = find_nearest(last, leaves)
    return nearest(key, keys) or (f" (did you mean {leaves[leaf]}?)" if leaf else "")


def get_blocks(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings models in an annotation such as ``LoraSettings | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        return [block for part in get_args(annotation) for block in get_blocks(part)]
    return []


def _get_items(annotation: Any) -> list[type[BaseModel]]:
    own = get_origin(annotation) is tuple
    return [
        block
        for part in get_args(annotation)
        for block in (get_blocks(part) if own else _get_items(part))
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"
