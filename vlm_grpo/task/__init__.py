"""The interface for tasks: ``Task``, ``reward``, ``metric``, and modules of helpers."""

from vlm_grpo.task.rewards import FAILURES, Rule, metric, reward
from vlm_grpo.task.task import PlainQuestion, Task, write_prompt

__all__ = ["FAILURES", "PlainQuestion", "Rule", "Task", "metric", "reward", "write_prompt"]
