"""The interface for tasks: ``Task``, ``reward``, ``metric``, and modules of helpers.

The names are imported when they are first used: commands read ``task.coordinates`` at their start,
which must not load NumPy and Pillow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_grpo.task.rewards import FAILURES, Rule, metric, reward
    from vlm_grpo.task.task import PlainQuestion, Task, write_prompt

__all__ = ["FAILURES", "PlainQuestion", "Rule", "Task", "metric", "reward", "write_prompt"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "task" if name in ("PlainQuestion", "Task", "write_prompt") else "rewards"
    return getattr(import_module(f"{__name__}.{module}"), name)
