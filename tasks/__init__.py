"""Task plugins, one per file; load them with ``vlm_grpo.task.registry.load_task``."""
