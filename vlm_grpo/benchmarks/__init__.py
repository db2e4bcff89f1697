"""Benchmarks: their definitions; their official rules are in ``tasks/graders``."""
