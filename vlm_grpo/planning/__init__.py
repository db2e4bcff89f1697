"""Estimates of a run's memory and time, before weights are downloaded or anything runs."""

from vlm_grpo.planning.planner import Plan, Planner, plan

__all__ = ["Plan", "Planner", "plan"]
