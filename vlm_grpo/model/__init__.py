"""The policy model: loading it, prompting it, sampling from it and scoring with it."""
