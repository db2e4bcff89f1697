"""Dataset converters, and the scripts that generate the embedded data and model."""
