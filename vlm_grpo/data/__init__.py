"""Loading and checking datasets: files, tables and the Hugging Face Hub.

Every row is checked before a model is loaded, and all bad rows are reported together.
"""

from vlm_grpo.data.loading import load_examples, load_run_task, load_split

__all__ = ["load_examples", "load_run_task", "load_split"]
