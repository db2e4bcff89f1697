"""Graders of structured answers: tables, formulas, tests of pages, and the rules of benchmarks."""
