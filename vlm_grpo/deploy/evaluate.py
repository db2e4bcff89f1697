"""Evaluate a model, a checkpoint or a run on a recipe's held-out examples."""

from __future__ import annotations

from pathlib import Path

from vlm_grpo.config.run import Settings
from vlm_grpo.deploy.resolve import find_checkpoint
from vlm_grpo.evaluation import evaluate as evaluation


def evaluate(settings: Settings, checkpoint: str | Path | None = None) -> evaluation.Evaluation:
    """Evaluate the recipe's model, or a checkpoint, on the recipe's held-out examples.

    The predictions are written to the folder ``evaluation`` of the run.

    Args:
        settings: settings with ``data.eval``.
        checkpoint: folder of a checkpoint, or a run, by folder or name, whose newest checkpoint is
            evaluated; None: the model before training.

    Raises:
        UserError: the recipe has no ``data.eval``, or the model or the data cannot be loaded.
    """
    return evaluation.evaluate(settings, find_checkpoint(checkpoint))
