"""Datasets and their checks: from files, tables and the hub to a list of ``Example``.

Every row is checked before any model is loaded, and all bad rows are reported at once.
"""

from vlm_grpo.data.loading import load_examples

__all__ = ["load_examples"]
