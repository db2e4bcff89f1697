"""Settings and files of evaluations of the counting recipe."""

import json
from pathlib import Path
from typing import Any

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings


def make_settings(tmp_path: Path, name: str = "run") -> Settings:
    """Return settings of an evaluation on 40 examples."""
    overrides = ["data.eval_limit=40", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", overrides)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
