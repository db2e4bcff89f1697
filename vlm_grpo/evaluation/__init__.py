"""Generating an output for every example, scoring it and reporting benchmarks."""
