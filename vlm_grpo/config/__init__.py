"""Settings: frozen, validated, and saved with each run."""

from vlm_grpo.config.run import DataSettings, Settings, load_settings

__all__ = ["DataSettings", "Settings", "load_settings"]
