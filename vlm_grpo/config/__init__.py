"""Settings: frozen, validated, saved with a run."""
