"""Converters, readers of annotations, and scripts that generate the embedded data and model."""
