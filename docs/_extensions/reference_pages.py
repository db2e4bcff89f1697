"""Directives that generate the reference of settings and of commands from the code.

``settings`` lists every key of a recipe with its type, default and docstring, and the combinations
that are refused; ``commands`` prints
the help of every command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from vlm_grpo.cli.app import app as program
from vlm_grpo.config.listing import SettingReference, list_refusals, list_settings


class SettingsDirective(Directive):
    """Document the settings of one block; without an argument, those outside all blocks."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        block = self.arguments[0] if self.arguments else ""
        found = [s for s in list_settings() if s.key.partition(".")[0] == block]
        if not block:
            found = [setting for setting in list_settings() if "." not in setting.key]
        refused = [nodes.list_item("", nodes.paragraph(text=row)) for row in list_refusals(block)]
        listed = [nodes.paragraph(text="Refused:"), nodes.bullet_list("", *refused)]
        settings = nodes.definition_list("", *map(self._describe, found))
        return [settings, *(listed if refused else [])]

    def _describe(self, setting: SettingReference) -> nodes.definition_list_item:
        default = "required" if setting.default is None else f"default {setting.default}"
        term = nodes.term("", "", nodes.literal(text=setting.key), ids=[f"setting-{setting.key}"])
        term += nodes.Text(" ")
        term += nodes.emphasis(text=f"{setting.type}, {default}")
        definition = nodes.definition()
        lines = setting.description.splitlines()
        if setting.other_names:
            lines += ["", f"Elsewhere: {', '.join(setting.other_names)}."]
        if setting.on_resume:
            lines += ["", setting.on_resume]
        self.state.nested_parse(StringList(lines, "settings"), 0, definition)
        return nodes.definition_list_item("", term, definition)


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
