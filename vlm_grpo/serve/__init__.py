"""Servers outside this process that generate completions."""
