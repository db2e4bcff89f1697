"""Arguments and helpers that several commands share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vlm_grpo.coordinates import FRAMES, CoordinateFrame
from vlm_grpo.errors import Stopped, UserError, nearest

if TYPE_CHECKING:
    from vlm_grpo.config.run import DataSettings
    from vlm_grpo.model.prompts import PromptBuilder

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
RecipeTask = Annotated[
    str | None,
    typer.Option("--task", help="Task to use instead of the recipe's: a name or a .py file."),
]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Name of a task, or a .py file.")]
TaskOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="OPTION=VALUE", help="Options of the task, for example tags=true."),
]
ImageRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of the images; default: the folder of the data file."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Folder or Hub name of a model, or embedded: build every prompt for it, without its "
        "weights.",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(min=1, help="Pixel budget of an image; default: that of the model."),
]


def load_prompts(
    model: str | None, max_pixels: int | None, data: DataSettings
) -> PromptBuilder | None:
    """Load the builder of a model's prompts, without its weights; None without a model.

    Raises:
        UserError: the model cannot be loaded, or takes no pixel budget.
    """
    if model is None:
        return None
    from vlm_grpo.config.policy import PolicySettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.model.prompts import load_prompt_builder

    policy = PolicySettings(max_pixels=max_pixels)
    return load_prompt_builder(Settings(task="any", model=model, data=data, policy=policy))


class SettingsCommand(TyperCommand):
    """A command whose settings are written ``KEY=VALUE``, and which explains ``--KEY VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            UserError: an unknown option is a setting, here or in another trainer.
        """
        known = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        for word in args:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                _explain_option(option)
        return super().parse_args(ctx, args)


def _explain_option(option: str) -> None:
    """Raise a UserError if the option is a setting; others are left to the parser."""
    from vlm_grpo.config.base import known_keys
    from vlm_grpo.config.other_trainers import find_other_setting
    from vlm_grpo.config.run import Settings

    name = option[2:].replace("-", "_")
    keys = list(known_keys(Settings))
    if name not in keys and (other := find_other_setting(name)) is not None:
        raise UserError(f"there is no option {option}: {other}; settings are written KEY=VALUE")
    same = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
    if same:
        raise UserError(f"there is no option {option}: settings have no dashes, {same[0]}=VALUE")


def add_task_override(overrides: Sequence[str] | None, task: str | None) -> list[str]:
    """Return the overrides with ``--task`` as the last one."""
    return [*(overrides or []), *([f"task={task}"] if task else [])]


def get_frame(name: str) -> CoordinateFrame:
    """Return the coordinate frame with this name.

    Raises:
        UserError: there is no such frame; the message suggests the nearest name.
    """
    if name not in FRAMES:
        raise UserError(
            f"there is no frame {name!r}{nearest(name, FRAMES)}: give one of {', '.join(FRAMES)}"
        )
    return FRAMES[name]


def parse_task_options(options: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``tags=true weights.exact=2`` into a task's options.

    Raises:
        UserError: an option is not ``name=value``, or its value is not valid YAML.
    """
    from omegaconf import OmegaConf

    from vlm_grpo.config.recipes import PARSE_ERRORS

    for option in options or []:
        if "=" not in option:
            raise UserError(
                f"{option!r} is not an option of a task: write name=value, for example tags=true"
            )
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(options or [])))
    except PARSE_ERRORS as error:
        raise UserError(f"the task's options cannot be parsed: {error}") from error
    return values


@contextmanager
def exit_when_stopped(remains: str) -> Iterator[None]:
    """Turn a requested stop into one printed line and its exit status.

    Args:
        remains: what an interrupt leaves behind, for the line.
    """
    try:
        yield
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.status) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {remains}", err=True)
        raise typer.Exit(130) from None
