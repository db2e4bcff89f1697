"""``vlm-grpo settings``: what there is to set."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.listing import SettingReference

WIDTH = 88


def settings(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="A setting, a block, or another trainer's setting."),
    ] = None,
) -> None:
    """List the settings of a run, or explain one setting or one block of them.

    \b
    vlm-grpo settings                        all settings with their defaults
    vlm-grpo settings optim                  what each setting of a block does
    vlm-grpo settings optim.lr
    vlm-grpo settings learning_rate          the equivalent of another trainer's setting
    """
    for line in _list_all() if key is None else _explain(key):
        typer.echo(line)


def _list_all() -> Iterator[str]:
    from vlm_grpo.config.listing import list_blocks, list_settings

    blocks, block = list_blocks(), ""
    for setting in list_settings():
        name, _, rest = setting.key.partition(".")
        if rest and name != block:
            block = name
            yield f"\n{blocks[block].splitlines()[0]}"
        default = "required" if setting.default is None else setting.default
        yield f"  {setting.key:<40} {default}"
    yield "\nvlm-grpo settings KEY explains one of them, or a block such as optim. Settings are"
    yield "written KEY=VALUE, with values in YAML: None is null, () is [], True is true."


def _explain(key: str) -> Iterator[str]:
    from vlm_grpo.config.listing import list_blocks, list_refusals, list_settings
    from vlm_grpo.config.other_trainers import find_other_setting
    from vlm_grpo.config.run import Settings
    from vlm_grpo.config.section import known_keys, suggest_key

    found = [s for s in list_settings() if s.key == key or s.key.startswith(f"{key}.")]
    if not found and (other := find_other_setting(key)) is not None:
        yield f"{other}."
        found = [setting for setting in list_settings() if setting.key in other.keys]
    elif not found:
        hint = suggest_key(key, list(known_keys(Settings)))
        raise UserError(f"there is no setting {key}{hint}: vlm-grpo settings lists all of them")
    if key in list_blocks():
        yield from [list_blocks()[key], ""]
    for setting in found:
        yield from _format(setting)
    for refusal in list_refusals(key) if key in list_blocks() else ():
        yield textwrap.fill(f"Refused: {refusal}", WIDTH, subsequent_indent="    ")


def _format(setting: SettingReference) -> Iterator[str]:
    default = "required" if setting.default is None else f"default {setting.default}"
    yield f"{setting.key}: {setting.type}, {default}"
    text = " ".join(setting.description.replace("``", "").split())
    if setting.other_names:
        text += f" Elsewhere: {', '.join(setting.other_names)}."
    if setting.on_resume:
        text += f" {setting.on_resume}"
    yield textwrap.indent(textwrap.fill(text, WIDTH), "    ")
