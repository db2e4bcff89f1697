"""Names of well-known models on the Hugging Face hub."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from vlm_grpo.errors import nearest


@cache
def load_known_models() -> dict[str, Any]:
    """Return well-known models by name, with the public values of their configurations and shapes
    for a plan (written by ``perf/known_models.py``)."""
    return json.loads(files("vlm_grpo").joinpath("model/known_models.json").read_text("utf-8"))


def suggest_model(source: str) -> str:
    """Return a hint at the well-known model whose name is nearest, unless ``source`` is right."""
    known = load_known_models()
    return "" if source in known or Path(source).is_dir() else nearest(source, known)
