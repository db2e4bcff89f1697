"""Checkpoints: saving the state of a run, and resuming from it."""

from vlm_grpo.checkpoint.manager import CheckpointManager, RunState, find_checkpoint
from vlm_grpo.checkpoint.partial_step import PartialStep

__all__ = ["CheckpointManager", "PartialStep", "RunState", "find_checkpoint"]
