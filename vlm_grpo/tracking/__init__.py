"""Metrics, alarms, trackers and the files of a run."""
