"""Checkpoints: what they hold, how they are written and how a run resumes from one."""

from vlm_grpo.checkpoint.manager import CheckpointManager, RunState, find_checkpoint
from vlm_grpo.checkpoint.partial_step import PartialStep

__all__ = ["CheckpointManager", "PartialStep", "RunState", "find_checkpoint"]
