"""Loading and checking datasets: files, tables and the Hugging Face Hub."""

from vlm_grpo.data.loading import load_examples, load_split
from vlm_grpo.data.mixed_task import load_run_task

__all__ = ["load_examples", "load_run_task", "load_split"]
