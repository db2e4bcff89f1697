"""Training recipes, one YAML each."""
