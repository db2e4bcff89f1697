"""Generating an output for every example, scoring it and reporting benchmarks."""

from vlm_grpo.evaluation.evaluate import Evaluation
from vlm_grpo.evaluation.held_out import HeldOutEvaluator, load_held_out

__all__ = ["Evaluation", "HeldOutEvaluator", "load_held_out"]
