"""Scoring of completions with the rewards of a task."""
