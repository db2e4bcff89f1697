"""Processes, sharding and the optimizer that they share."""
