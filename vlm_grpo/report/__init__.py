"""The HTML report of a run: results, metric curves, and completions with their images.

The report is one self-contained file that makes no network requests. ``build_report`` writes it
for a finished or an unfinished run; ``compare_runs`` compares two or more runs.
"""
