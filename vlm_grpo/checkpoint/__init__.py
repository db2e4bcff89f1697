"""Checkpoints: what they hold, how they are written and how a run resumes from one."""
