"""What a run will need before anything of it is downloaded or run."""

from vlm_grpo.planning.devices import named_device, this_device
from vlm_grpo.planning.planner import Planner, lines

__all__ = ["Planner", "lines", "named_device", "this_device"]
