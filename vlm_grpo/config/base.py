"""What all settings share: frozen pydantic models, and validation errors in plain words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from vlm_grpo.errors import nearest

# Other trainers' names for a setting that has another name here.
ALIASES = {
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "per_device_train_batch_size": "optim.prompts_per_step",
    "adam_epsilon": "optim.eps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "evaluation.every",
    "report_to": "logging.trackers",
    "dataset_name": "data.train",
    "model_name_or_path": "model",
    "bf16": "policy.dtype",
    "lora_r": "policy.lora.r",
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_target_modules": "policy.lora.target",
    "freeze_vision_modules": "policy.freeze",
}

# Pydantic speaks JSON's language, a recipe's author YAML's.
_PLAIN_TERMS = {
    "a valid integer": "a whole number",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping of keys",
    "an object": "a mapping of keys",
    "a valid string": "text",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


class Frozen(BaseModel):
    """A block of settings: immutable, no unknown keys, fields described by their docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a settings model, blocks before their fields."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for block in _blocks(field.annotation):
            yield from known_keys(block, f"{prefix}{name}.")


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys, as on the command line."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return flat


def plain(message: str) -> str:
    """What pydantic expects, as the end of a sentence that begins with "should".

    >>> plain("Input should be a valid integer")
    'be a whole number'
    """
    message = message.rpartition("should ")[2]
    for term, ours in _PLAIN_TERMS.items():
        message = message.replace(term, ours)
    return message


def no_value(key: str) -> str:
    """What to tell about a setting without default that nobody has set."""
    return f"{key} has no value: add {key}=… to the command or recipe"


def _required_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.is_required():
            yield prefix + name
            for block in _blocks(field.annotation):
                yield from _required_keys(block, f"{prefix}{name}.")


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each wrong key: its name, its value, and what is expected there."""
    expected: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        key = _key(problem["loc"], model)
        if problem["type"] == "extra_forbidden":
            texts = [f"unknown key {key}{_meant(key, model)}"]
        elif problem["type"] == "missing":
            # A block that is missing as a whole is missing for the sake of its required fields.
            inner = [k for k in _required_keys(model) if k.startswith(f"{key}.")]
            texts = [
                f"{k} has no value: add {k}=… to the command or recipe" for k in inner or [key]
            ]
        elif problem["type"] == "value_error":
            texts = problem["msg"].removeprefix("Value error, ").split("\n")
            if problem["loc"] and not isinstance(problem["input"], dict):
                texts = [f"{key}={_short(problem['input'])} {text}" for text in texts]
        else:
            texts = [f"{key}={_short(problem['input'])} should {plain(problem['msg'])}"]
        # The branches of a union each report the same key: one line, joined by "or".
        for head, _, tail in (text.partition(" should ") for text in texts):
            tails = expected.setdefault(head, [])
            if tail and tail not in tails:
                tails.append(tail)
    return [
        f"{head} should {' or '.join(tails)}" if tails else head for head, tails in expected.items()
    ]


def _key(location: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """The dotted key of a pydantic location, without the names of union branches."""
    parts: list[str] = []
    blocks = [model]
    for part in location:
        fields = [block.model_fields[part] for block in blocks if part in block.model_fields]
        if fields:
            blocks = [block for field in fields for block in _blocks(field.annotation)]
            parts.append(str(part))
        elif blocks and isinstance(part, str) and part not in {b.__name__ for b in blocks}:
            parts.append(part)
            blocks = []
    return ".".join(parts)


def _meant(key: str, model: type[BaseModel]) -> str:
    keys = list(known_keys(model))
    last = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == last]
    if last in ALIASES or len(same_leaf) == 1:
        return f" (did you mean {ALIASES.get(last) or same_leaf[0]}?)"
    if hint := nearest(key, keys):
        return hint
    leaves = {known.rpartition(".")[2]: known for known in reversed(keys)}
    hint = nearest(last, leaves)
    leaf = hint.removeprefix(" (did you mean ").removesuffix("?)")
    return f" (did you mean {leaves[leaf]}?)" if hint else ""


def _blocks(annotation: Any) -> list[type[BaseModel]]:
    """The settings models that an annotation admits (``LoraSettings | None`` admits one)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        return [block for part in get_args(annotation) for block in _blocks(part)]
    return []


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"
