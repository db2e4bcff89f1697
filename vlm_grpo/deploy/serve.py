"""The vLLM server of a trained model, or of the rollouts of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vlm_grpo.config.recipes import Overrides, load_settings, recipe_names
from vlm_grpo.deploy.resolve import resolve_model
from vlm_grpo.errors import UserError
from vlm_grpo.serve.client import SERVED_NAME
from vlm_grpo.serve.launch import (
    build_command,
    build_environment,
    build_program,
    build_public_command,
    describe_model,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts a server.

    Attributes:
        words: the command.
        environment: variables in addition to this process's.
        served_name: name of the model in requests.
        url: address of the server.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    served_name: str
    url: str


def find_server_command(
    name: str,
    overrides: Overrides,
    address: tuple[str, int],
    python: Path | None = None,
    for_rollouts: bool = False,
) -> ServerCommand:
    """Find the command that serves a model.

    Args:
        name: a model, run or checkpoint as for ``resolve_model``; for rollouts also a recipe.
        overrides: settings that override those of the run or recipe.
        address: the host and port to listen on.
        python: Python of the environment with vLLM; None: ``rollout.vllm.python`` of the run.
        for_rollouts: the server samples for a run with these settings.

    Raises:
        UserError: there is no such model or Python.
    """
    if for_rollouts:
        is_recipe = name in recipe_names() or name.endswith((".yaml", ".py"))
        found = load_settings(name, overrides) if is_recipe else None
        settings, served_name = found or resolve_model(name, overrides).settings, SERVED_NAME
        command = build_command(describe_model(settings, for_rollouts=True), address)
        environment = build_environment(settings)
    else:
        found = resolve_model(name, overrides)
        settings, folder = found.settings, found.run or found.checkpoint
        served_name = settings.model if folder is None else folder.resolve().name
        model = describe_model(settings, found.checkpoint)
        command, environment = build_public_command(model, served_name, address), {}
    if settings.policy.load_in != "none":
        logger.warning(
            "the server holds the base weights whole, and this model was trained on weights in %s: "
            "its log-probs differ from the policy's (vlm-grpo export measures by how much)",
            settings.policy.load_in,
        )
    vllm = settings.rollout.vllm
    python = python or (None if vllm is None else vllm.python)
    if python is None or not python.is_file():
        missing = "" if python is None else f"there is no program {python}: "
        raise UserError(f"{missing}give the Python of an environment with vLLM by --python")
    words = (*build_program(python), *command)
    return ServerCommand(words, environment, served_name, f"http://{address[0]}:{address[1]}")
