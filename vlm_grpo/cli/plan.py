"""``vlm-grpo plan``: estimate the memory and time of a recipe before it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vlm_grpo.cli.common import Overrides, Recipe
from vlm_grpo.errors import UserError, nearest


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU by name, for example H100, or by memory, for example 24GB; "
            "default: this machine."
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of such devices.")] = 1,
    weights: Annotated[
        Literal["replicated", "sharded", "offloaded"],
        typer.Option(
            help="replicated; sharded: over the devices by FSDP2; offloaded: the shards in main "
            "memory."
        ),
    ] = "replicated",
    reserved: Annotated[
        float,
        typer.Option(
            help="Share of each device's memory that other processes use, for example the "
            "--gpu-memory-utilization of a vLLM server."
        ),
    ] = 0.0,
) -> None:
    """Estimate what a recipe needs, before weights are downloaded or anything runs.

    RECIPE may also be the name of a well-known model, which is planned without its files, or
    models, which prints a table of all of them.

    Counts the prompt tokens of the data, adds up the memory of each component, estimates the
    seconds per step, and finds changes that shorten it or make it fit, each with its figures.

    \b
    vlm-grpo plan counting
    vlm-grpo plan grounding_qwen2_5_vl_3b data.train=train.jsonl data.eval=test.jsonl --gpu 24GB
    vlm-grpo plan recipe.yaml rollout.num_generations=16 --gpu H100 --devices 8
    vlm-grpo plan recipe.yaml --gpu H100 --devices 8 --weights sharded --reserved 0.3
    vlm-grpo plan Qwen/Qwen2.5-VL-7B-Instruct policy.lora.r=16 --gpu 24GB
    vlm-grpo plan models
    """
    from vlm_grpo.config.recipes import load_settings
    from vlm_grpo.model.hub import load_known_models
    from vlm_grpo.planning import known
    from vlm_grpo.planning.plan import build_plan
    from vlm_grpo.planning.planner import Planner, choose_device

    models = load_known_models()
    if recipe == "models" or (recipe in models and gpu is None):
        given = {"--gpu": gpu, "--devices": devices - 1, "--reserved": reserved}
        given["--weights"] = weights != "replicated"
        if ignored := [option for option, value in given.items() if value]:
            raise UserError(
                f"{ignored[0]} has no effect on the table of cards: leave it out"
                + ("" if recipe == "models" else ", or name a card with --gpu")
            )
        names = list(models) if recipe == "models" else [recipe]
        typer.echo("\n".join(known.format_table(names, overrides or [])))
        return
    if recipe in models:
        kind, settings = known.KnownPlanner, known.build_known_settings(recipe, overrides or [])
    else:
        _check_recipe(recipe)
        kind, settings = Planner, load_settings(recipe, overrides or [])
    planner = kind(settings, choose_device(gpu, reserved), devices, weights)
    typer.echo(build_plan(planner))


def _check_recipe(name: str) -> None:
    """Refuse what is rather the name of a model than that of a recipe."""
    from vlm_grpo.config.recipes import recipe_names
    from vlm_grpo.model.hub import suggest_model

    if Path(name).exists() or Path(name).suffix in (".yaml", ".yml", ".py"):
        return
    hint = "" if nearest(name, recipe_names()) else suggest_model(name)
    if hint or (name.count("/") == 1 and not name.startswith((".", "/", "~"))):
        raise UserError(
            f"{name} is neither a recipe nor a well-known model{hint}: vlm-grpo plan models lists "
            f"those; plan another one with a recipe and model={name}"
        )
