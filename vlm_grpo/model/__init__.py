"""The policy model: loading, prompts, sampling and scoring."""
