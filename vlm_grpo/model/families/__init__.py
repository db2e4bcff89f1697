"""Model families: everything that depends on a model's architecture."""
