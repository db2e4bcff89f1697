"""Files of results with a line for each run, which grow while a script measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlm_grpo.utils.atomic_io import write_atomic


def load_runs(file: Path) -> list[dict[str, Any]]:
    """Return the runs in a file; none if it does not exist."""
    return json.loads(file.read_text()) if file.exists() else []


def save_runs(file: Path, runs: list[dict[str, Any]]) -> None:
    """Replace a file by one with these runs."""
    lines = ",\n".join(json.dumps(run) for run in runs)
    write_atomic(file, f"[\n{lines}\n]\n".encode())
