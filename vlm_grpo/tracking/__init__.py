"""Metrics, alarms, trackers and the files of a run."""

from vlm_grpo.tracking.metrics import rollout_metrics
from vlm_grpo.tracking.progress import Progress
from vlm_grpo.tracking.run_dir import RunDir, lock_run
from vlm_grpo.tracking.samples import HELD_OUT_SHOWN
from vlm_grpo.tracking.speed import StepMeter
from vlm_grpo.tracking.summary import TrainResult, describe_run
from vlm_grpo.tracking.trackers import check_installed

__all__ = [
    "HELD_OUT_SHOWN",
    "Progress",
    "RunDir",
    "StepMeter",
    "TrainResult",
    "check_installed",
    "describe_run",
    "lock_run",
    "rollout_metrics",
]
