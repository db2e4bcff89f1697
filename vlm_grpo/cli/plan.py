"""``vlm-grpo plan``: estimate the memory and time of a recipe before it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vlm_grpo.cli.common import Overrides, Recipe


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

    Counts the prompt tokens of the data, adds up the memory of each component, estimates the
    seconds per step, and finds the largest group and batch that fit, or changes that make it fit.

    \b
    vlm-grpo plan counting
    vlm-grpo plan grounding_qwen2_5_vl_3b data.train=train.jsonl data.eval=test.jsonl --gpu 24GB
    vlm-grpo plan recipe.yaml rollout.num_generations=16 --gpu H100 --devices 8
    vlm-grpo plan recipe.yaml --gpu H100 --devices 8 --weights sharded --reserved 0.3
    """
    from vlm_grpo.config.recipes import load_settings
    from vlm_grpo.planning.plan import plan

    typer.echo(plan(load_settings(recipe, overrides or []), gpu, devices, weights, reserved))
