"""Sampling and scoring of completions, with a shared prompt or with a repeated one."""
