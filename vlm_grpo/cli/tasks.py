"""``vlm-grpo tasks``: what there is to train."""

from __future__ import annotations

import typer

from vlm_grpo.errors import UserError


def tasks() -> None:
    """List the installed tasks and recipes."""
    from vlm_grpo.config.recipes import describe_recipe, recipe_names
    from vlm_grpo.task.registry import load_task_class, task_names

    typer.echo("Tasks (or give the path of your own .py file):")
    for name in task_names():
        try:
            summary = (load_task_class(name).__doc__ or "").strip().partition("\n")[0]
        except UserError as error:  # one broken plugin must not hide the others
            summary = f"cannot be loaded: {error}"
        typer.echo(f"  {name:<12} {summary}")
    typer.echo("\nRecipes, for vlm-grpo train:")
    for name in recipe_names():
        typer.echo(f"  {name:<24} {describe_recipe(name)}")
