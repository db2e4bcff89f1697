"""Loading and checking datasets: files, tables and the Hugging Face Hub."""

from vlm_grpo.data.loading import load_examples, load_run_task, load_split

__all__ = ["load_examples", "load_run_task", "load_split"]
