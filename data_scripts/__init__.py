"""Dataset converters, and the scripts that make the embedded data and model."""
