"""One page that shows what a run learned: numbers, curves, and what the model wrote.

The page is one file that opens from disk and asks the network for nothing. ``build_report`` makes
it for a run, at any time while the run goes on; ``compare_runs`` sets two runs side by side.
"""

from vlm_grpo.report.page import build_report, compare_runs

__all__ = ["build_report", "compare_runs"]
