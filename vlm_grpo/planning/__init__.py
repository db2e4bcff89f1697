"""What a run will need before anything of it is downloaded or run."""

from vlm_grpo.planning.planner import Plan, Planner, plan

__all__ = ["Plan", "Planner", "plan"]
