"""Evaluation: generating and scoring answers, and comparing the results."""
