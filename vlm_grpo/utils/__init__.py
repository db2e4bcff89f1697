"""Helpers without knowledge of models or tasks."""
