"""The command line: ``vlm-grpo``, also as ``python -m vlm_grpo.cli`` for launchers."""

from vlm_grpo.cli.app import main

__all__ = ["main"]
