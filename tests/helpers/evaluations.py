"""Settings and files of evaluations of the counting recipe."""

import json
from pathlib import Path
from typing import Any

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings


def make_settings(rows: Path, tmp_path: Path, name: str = "run") -> Settings:
    overrides = [f"data.eval={rows}", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", [*overrides, "data.eval_limit=null"])


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
