"""Settings: frozen, validated, and saved with each run."""
