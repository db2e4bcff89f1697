"""``vlm-grpo plan``: memory and time of a recipe before it runs."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from vlm_grpo.config.run import load_settings


def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="As for train: a name, a .yaml or a .py file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings over those of the recipe."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU's name, as H100, or its memory, as 24GB; else this machine."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many such devices.")] = 1,
) -> None:
    """Say what a recipe will need, before weights are downloaded or anything runs.

    Counts the data's prompt tokens, adds up the memory of each part, estimates the seconds of a
    step, and finds the largest group and batch that fit, or the changes that make it fit.

    \b
    vlm-grpo plan counting
    vlm-grpo plan grounding_qwen2_5_vl_3b data.train=train.jsonl data.eval=test.jsonl --gpu 24GB
    vlm-grpo plan recipe.yaml rollout.num_generations=16 --gpu H100 --devices 8
    """
    settings = load_settings(recipe, overrides or [])
    typer.echo(importlib.import_module("vlm_grpo.planning").plan(settings, gpu, devices))
