"""Sampling and scoring completions: the shared-prefix form and the plain repeated one."""
