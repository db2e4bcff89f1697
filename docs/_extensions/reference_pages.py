"""Directives that generate the reference of settings and of commands from the code.

``settings`` lists every key of a recipe with its type, default and docstring; ``commands`` prints
the help of every command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx

from vlm_grpo.cli.app import app as program
from vlm_grpo.config.run import Settings


class SettingsDirective(Directive):
    """Document the settings of one block; without an argument, those outside all blocks."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        fields = list_fields(self.arguments[0] if self.arguments else "")
        items = [self._describe(key, field) for key, field in fields]
        return [nodes.definition_list("", *items)]

    def _describe(self, key: str, field: FieldInfo) -> nodes.definition_list_item:
        if field.description is None:
            raise self.error(f"the setting {key} has no docstring")
        default = "required" if field.is_required() else f"default {show_default(field)}"
        term = nodes.term("", "", nodes.literal(text=key), ids=[f"setting-{key}"])
        term += nodes.Text(" ")
        term += nodes.emphasis(text=f"{show_type(field.annotation)}, {default}")
        definition = nodes.definition()
        lines = StringList(field.description.splitlines(), "settings")
        self.state.nested_parse(lines, 0, definition)
        return nodes.definition_list_item("", term, definition)


def list_fields(block: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the key and the field of every setting of a block and of the blocks inside it."""
    model: type[BaseModel] = Settings
    for part in filter(None, block.split(".")):
        (model,) = get_blocks(model.model_fields[part])
    for name, field in model.model_fields.items():
        key = f"{block}.{name}" if block else name
        is_block = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if not is_block:
            yield key, field
        if block and get_blocks(field):
            yield from list_fields(key)


def get_blocks(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the block that a field holds, also if the field may be None; empty for a value."""
    types = [field.annotation, *get_args(field.annotation)]
    return [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]


def show_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, Path) else repr(value)


def show_type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    literal = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace(", ", " | "), text)
    return literal.replace("NoneType", "None")


class CommandsDirective(Directive):
    """Print the help of every command."""

    def run(self) -> list[nodes.Node]:
        group = typer.main.get_command(program)
        found: list[nodes.Node] = []
        for names, command in list_commands(group, ("vlm-grpo",)):
            section = nodes.section(ids=["-".join(names).replace("vlm-grpo-", "")])
            section += nodes.title(text=" ".join(names))
            context = click.Context(command, info_name=" ".join(names), terminal_width=90)
            section += nodes.literal_block(text=command.get_help(context), language="text")
            found.append(section)
        return found


def list_commands(
    group: click.Command, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the full name and the command of every command of the program."""
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from list_commands(command, (*names, name))
        else:
            yield (*names, name), command


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings", SettingsDirective)
    app.add_directive("commands", CommandsDirective)
    return {"parallel_read_safe": True}
