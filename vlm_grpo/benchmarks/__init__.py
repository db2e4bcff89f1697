"""Benchmarks: their definitions, official rules and metrics."""
