"""The report of a run, or of several: one HTML file that makes no network requests."""
