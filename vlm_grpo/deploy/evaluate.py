"""Evaluate a model, a checkpoint or a run on a recipe's held-out examples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlm_grpo.config.run import Settings
from vlm_grpo.data.objects import Objects, Rows, TaskObject
from vlm_grpo.deploy.resolve import find_checkpoint
from vlm_grpo.eval import evaluate as evaluation
from vlm_grpo.eval.scored import Scored
from vlm_grpo.serve.chat import Endpoint


def evaluate(
    settings: Settings,
    checkpoint: str | Path | None = None,
    server: Endpoint | str | None = None,
    *,
    task: TaskObject | Mapping[str, TaskObject] | None = None,
    data: Rows | Mapping[str, Rows] | None = None,
    held_out: Rows | Mapping[str, Rows] | None = None,
) -> Scored:
    """Evaluate the recipe's model, a checkpoint or a server on the recipe's held-out examples.

    The predictions are written to the folder ``evaluation`` of the run.

    Args:
        settings: settings with ``data.eval``.
        checkpoint: folder of a checkpoint, or a run, by folder or name, whose newest checkpoint is
            evaluated; None: the model before training.
        server: address of a model, such as ``"http://localhost:8000/v1"`` or an ``Endpoint``, which
            is asked instead of loading weights.
        task, data, held_out: Python objects in place of those of the settings, as for ``train``.

    Raises:
        UserError: the recipe has no ``data.eval``, the model or the data cannot be loaded, or the
            server cannot be used or gave no output for some examples.
    """
    objects = Objects(task, data, held_out)
    return evaluation.evaluate(settings, find_checkpoint(checkpoint), server, objects)
