"""Saving and resuming the complete state of a run."""
