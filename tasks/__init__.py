"""Task plugins, one per file; load them with ``vlm_grpo.registry.load_task``."""
