"""Arguments and helpers that several commands share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vlm_grpo.errors import Stopped, UserError, nearest

if TYPE_CHECKING:
    from vlm_grpo.serve.chat_client import Endpoint
    from vlm_grpo.task.coordinates import CoordinateFrame

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a recipe, or path to a .yaml recipe or a .py task."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that override the recipe's."),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Ask a model behind an OpenAI-compatible address (vLLM, SGLang, a hosted one) instead "
        "of loading weights; model=… or none names the one whose prompts it gets. A key is read "
        "from the environment variable OPENAI_API_KEY.",
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option("--served-model", metavar="NAME", help="Its name there; default: the only one."),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests at once; default: 16.", show_default=False)
]
Timeout = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds to wait for an answer; default: 600.", show_default=False),
]
FrameName = Annotated[
    str | None,
    typer.Option(
        "--frame",  # the module of frames is slow to import
        help="Coordinate frame of boxes, of which the model is not known: original, resized, "
        "permille, fraction, qwen2_vl, internvl, glm, paligemma, gemma4, molmo.",
    ),
]


class SettingsCommand(TyperCommand):
    """A command whose settings are written ``KEY=VALUE``, and which explains ``--KEY VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        for word in args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                _explain_option(option)
        return super().parse_args(ctx, args)


def _explain_option(option: str) -> None:
    """Raise a UserError if the option is a setting; others are left to the parser."""
    from vlm_grpo.config.other_trainers import find_other_setting
    from vlm_grpo.config.run import Settings
    from vlm_grpo.config.section import known_keys

    name = option[2:].replace("-", "_")
    keys = list(known_keys(Settings))
    if name not in keys and (other := find_other_setting(name)) is not None:
        raise UserError(f"there is no option {option}: {other}; settings are written KEY=VALUE")
    same = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
    if same:
        raise UserError(f"there is no option {option}: settings have no dashes, {same[0]}=VALUE")


def get_frame(name: str) -> CoordinateFrame:
    from vlm_grpo.task.coordinates import FRAMES

    if name not in FRAMES:
        raise UserError(
            f"there is no frame {name!r}{nearest(name, FRAMES)}: give one of {', '.join(FRAMES)}"
        )
    return FRAMES[name]


def build_endpoint(options: Mapping[str, Any], frame: str | None = None) -> Endpoint | None:
    """Build the endpoint of ``--server`` from a command's options; None without it."""
    names = ("served_model", "concurrency", "timeout")
    found = {name: options.get(name) for name in names} | {"frame": frame}
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if options["server"] is None:
        for name in given:
            raise UserError(f"--{name.replace('_', '-')} needs --server")
        return None
    from vlm_grpo.serve.chat_client import Endpoint

    if "frame" in given:
        given["frame"] = get_frame(given["frame"])
    return Endpoint(options["server"], given.pop("served_model", None), **given)


def parse_task_options(options: Sequence[str] | None) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from vlm_grpo.config.recipes import PARSE_ERRORS, parse_overrides

    # A recipe's task_options.tags=true is tags=true for a task alone.
    options = [option.removeprefix("task_options.") for option in options or []]
    for option in options:
        if "=" not in option:
            raise UserError(
                f"{option!r} is not an option of a task: write name=value, for example tags=true"
            )
    try:
        values: Any = OmegaConf.to_container(parse_overrides(options))
    except PARSE_ERRORS as error:
        raise UserError(f"the task's options cannot be parsed: {error}") from error
    return values


def find_checkpoint(given: str | None) -> Path | None:
    """Find a command's checkpoint, and print which one a name such as RUN or RUN@best means."""
    from vlm_grpo.model import resolve

    found = resolve.find_checkpoint(given)
    if given is not None and found not in (None, Path(given)):
        newest = "" if "@" in given else ", the newest of its run"
        typer.echo(f"checkpoint {found}{newest}")
    return found


def find_weights(given: str) -> str | Path:
    """Find a checkpoint or a model; a name that is no folder stays as given: ./path, owner/name."""
    found = find_checkpoint(given)
    return found if found is not None and found.is_dir() else given


@contextmanager
def exit_when_stopped(remains: str) -> Iterator[None]:
    """Turn a requested stop into one printed line, with what ``remains``, and its exit status."""
    try:
        yield
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.status) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {remains}", err=True)
        raise typer.Exit(130) from None
