"""The checkout that a script of this folder belongs to, as the package that it measures.

``import checkout`` before anything of ``vlm_grpo``: the library is then imported from here and,
without an install, so are the folders that ``pyproject.toml`` maps into it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = (
    *("torch", "torchvision", "transformers", "peft", "accelerate", "pydantic", "omegaconf"),
    "qwen_vl_utils",
    *("jaxtyping", "numpy", "scipy", "PIL", "jinja2", "psutil", "yaml", "rich", "rapidfuzz"),
)
"""Modules without which no step runs."""

if missing := [name for name in REQUIRED if find_spec(name) is None]:
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"{Path(sys.argv[0]).name}: {sys.executable} lacks {', '.join(missing)}. Install them, or "
        f"fetch them on another machine with pip install --target FOLDER --python-version {version}"
        " --no-deps --only-binary=:all: …, copy the folder, and set PYTHONPATH=FOLDER"
    )
sys.path.insert(0, str(ROOT))
if not any(distributions(name="vlm-grpo")):
    sys.dont_write_bytecode = True  # nothing is written beside the sources
    import_module("vlm_grpo").__path__.append(str(ROOT))  # tasks, configs and data_scripts
