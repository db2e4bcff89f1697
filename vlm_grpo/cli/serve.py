"""``vlm-grpo serve``: start a vLLM server of a trained model, or for a run's rollouts."""

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.cli.common import Overrides
from vlm_grpo.errors import UserError
from vlm_grpo.utils import trust

logger = logging.getLogger(__name__)


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hub name, folder, run, checkpoint, or embedded; for rollouts also a recipe.",
        ),
    ],
    overrides: Overrides = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Python of the environment with vLLM; default: the run's rollout.vllm.python."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    for_rollouts: Annotated[
        bool,
        typer.Option(
            "--for-rollouts",
            help="Serve what a run with rollout.vllm.urls samples from, with the run's recipe "
            "and settings. Anyone who reaches the address can change its weights.",
        ),
    ] = False,
    argument: Annotated[
        list[str] | None,
        typer.Option(help="A further argument of vllm serve; repeat it for several."),
    ] = None,
) -> None:
    """Serve a model with vLLM, which is installed in an environment of its own.

    A checkpoint is served as it was trained, with its adapter and pixel budget, to any client of
    OpenAI's interface; the system prompt is the client's. This process becomes the server, which
    Ctrl-C ends.

    \b
    vlm-grpo serve runs/grounding --python vllm/bin/python
    vlm-grpo serve runs/mine/checkpoints/step-300 --python vllm/bin/python --host 0.0.0.0
    vlm-grpo serve Qwen/Qwen2.5-VL-3B-Instruct policy.max_pixels=1000000 --python vllm/bin/python
    vlm-grpo serve recipe.yaml --for-rollouts --python vllm/bin/python --port 8001 \\
        --argument=--tensor-parallel-size=2
    """
    from vlm_grpo.config.recipes import load_settings, recipe_names
    from vlm_grpo.model.resolve import resolve_model
    from vlm_grpo.serve import launch
    from vlm_grpo.serve.server import SERVED_NAME

    values, address = overrides or [], (host, port)
    if for_rollouts:
        is_recipe = model in recipe_names() or model.endswith((".yaml", ".py"))
        recipe = load_settings(model, values) if is_recipe else None
        settings, name = recipe or resolve_model(model, values).settings, SERVED_NAME
        arguments = launch.build_command(settings, address)
        environment = launch.build_environment(settings)
    else:
        found = resolve_model(model, values)
        settings, folder = found.settings, found.run or found.checkpoint
        name = settings.model if folder is None else folder.resolve().name
        arguments = launch.build_public_command(settings, found.checkpoint, name, address)
        environment = {}
    if settings.policy.load_in != "none":
        logger.warning(
            "the server holds the base weights whole, and this model was trained on weights in %s: "
            "its log-probs differ from the policy's (vlm-grpo export measures by how much)",
            settings.policy.load_in,
        )
    trust.allow(python)
    if python is None and settings.rollout.vllm is not None:
        python = settings.rollout.vllm.python
    if python is None or not python.is_file():
        missing = "" if python is None else f"there is no program {python}: "
        raise UserError(f"{missing}give the Python of an environment with vLLM by --python")
    words = [*launch.build_program(python), *arguments, *(argument or [])]
    typer.echo(f"$ {shlex.join(words)}")
    typer.echo(f"the model will be {name} at http://{host}:{port}")
    sys.stdout.flush()
    os.execve(words[0], words, os.environ | environment)
