"""The reference of all settings, read from their classes."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vlm_grpo.config.combinations import get_combinations
from vlm_grpo.config.other_trainers import list_other_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import find_on_resume, get_blocks

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True)
class SettingReference:
    """The documentation of a setting."""

    key: str
    type: str
    default: str | None  # None: it is required
    description: str
    on_resume: str

    @property
    def other_names(self) -> list[str]:
        found = [other for other in list_other_settings() if self.key in other.keys]
        return [f"{other.name} ({other.trainer})" for other in found]


def list_settings(
    prefix: str = "", model: type[BaseModel] = Settings
) -> Iterator[SettingReference]:
    """Yield every setting, in the order of the classes; an optional block in one is a setting."""
    for name, field in model.model_fields.items():
        key, blocks = prefix + name, get_blocks(field.annotation)
        if field.annotation not in blocks and (prefix or not blocks):
            yield _describe_field(key, field)
        for block in blocks:
            yield from list_settings(f"{key}.", block)


def list_blocks() -> dict[str, str]:
    blocks = {name: get_blocks(field.annotation) for name, field in Settings.model_fields.items()}
    return {
        name: inspect.getdoc(block[0]) or "" for name, block in blocks.items() if len(block) == 1
    }


def list_refusals(block: str) -> list[str]:
    """Return the combinations that the settings of a block refuse, or with "" those of a run."""
    if not block:
        return [row.text for row in get_combinations("Settings")]
    found: list[str] = []
    classes = get_blocks(Settings.model_fields[block].annotation)
    for own in classes:  # grows
        found += [row.text for row in get_combinations(own.__name__)]
        fields = own.model_fields.values()
        classes += [inner for field in fields for inner in get_blocks(field.annotation)]
    return found


def _describe_field(key: str, field: FieldInfo) -> SettingReference:
    if field.description is None:
        raise TypeError(f"the setting {key} has no docstring")
    default = None
    if not field.is_required():
        value = field.get_default(call_default_factory=True)
        default = str(value) if isinstance(value, Path) else repr(value)
    on_resume = find_on_resume(Settings, key).value
    return SettingReference(key, _describe_type(field), default, field.description, on_resume)


def _describe_type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {bound}"
        for constraint in field.metadata
        for name, sign in _BOUNDS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]
    return " ".join([_describe_annotation(field.annotation), ", ".join(bounds)]).strip()


def _describe_annotation(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_annotation(parts[0])
    if origin is Literal:
        return " | ".join(map(repr, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_describe_annotation, parts))
    if origin is not None:
        inner = ["…" if part is Ellipsis else _describe_annotation(part) for part in parts]
        return f"{origin.__name__}[{', '.join(inner)}]"
    return "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
