"""Estimates of memory and time before a run."""
