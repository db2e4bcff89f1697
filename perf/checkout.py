"""The checkout that a script of this folder belongs to, as the package that it measures.

``import checkout`` before anything of ``vlm_grpo``: the library is then imported from here and,
without an install, so are the folders that ``pyproject.toml`` maps into it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = (
    *("torch", "torchvision", "transformers", "peft", "accelerate", "numpy", "scipy", "jaxtyping"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "omegaconf", "antlr4"),
    *("qwen_vl_utils", "rapidfuzz", "PIL", "jinja2", "psutil", "yaml", "rich"),
)
"""Modules without which no step runs."""
NAMES = {"PIL": "pillow", "yaml": "pyyaml", "antlr4": "antlr4-python3-runtime"}

if missing := [NAMES.get(name, name) for name in REQUIRED if find_spec(name) is None]:
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"{Path(sys.argv[0]).name}: {sys.executable} lacks {len(missing)} packages. Install them, "
        "or fetch them on another machine, copy the folder here and set PYTHONPATH=FOLDER: pip "
        f"install --constraint constraints.txt --target FOLDER --python-version {version} "
        f"--only-binary=:all: --no-deps {' '.join(missing)}"
    )
sys.path.insert(0, str(ROOT))
is_silent, sys.dont_write_bytecode = sys.dont_write_bytecode, True
if find_spec("vlm_grpo.data_scripts") is None:  # not installed: nothing is written here
    import_module("vlm_grpo").__path__.append(str(ROOT))  # tasks, configs and data_scripts
else:
    sys.dont_write_bytecode = is_silent
