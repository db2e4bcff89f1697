"""Task plugins, one a file; load them with ``vlm_grpo.registry.load_task``."""
