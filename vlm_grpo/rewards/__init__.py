"""Scoring completions with the rewards of a task."""
