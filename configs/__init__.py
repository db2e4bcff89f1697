"""Training recipes, one YAML file each."""
