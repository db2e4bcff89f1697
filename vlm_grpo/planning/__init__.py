"""Estimates of a run's memory and time, before weights are downloaded or anything runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_grpo.planning.planner import Planner, plan
    from vlm_grpo.planning.search import Plan

__all__ = ["Plan", "Planner", "plan"]


def __getattr__(name: str) -> Any:
    """Import the planner of recipes when it is used: one of a known model needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.planner"), name)
