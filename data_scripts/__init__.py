"""Dataset converters and the makers of the embedded data and model."""
