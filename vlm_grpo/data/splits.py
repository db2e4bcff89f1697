"""The parts of a dataset that are trained and evaluated on."""

from __future__ import annotations

from pathlib import Path

from vlm_grpo.config.data import PYTHON, Split

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("val", "valid", "validation", "dev", "test"),
}
"""Names of each part in published datasets, the preferred one first."""


def stands_for_both(source: object) -> bool:
    """Return whether the name of a source stands for both its training and its held-out part."""
    is_named = source == PYTHON or str(source).startswith(("embedded:", "hf:"))
    path = Path(str(source))
    return is_named or path.suffix in (".yaml", ".yml") or path.is_dir()


def enter_split(path: Path, split: Split) -> Path:
    """Return a folder's subfolder of the split, or the path itself if it has none."""
    if not (path / "train").is_dir():
        return path
    found = (path / name for name in SPLIT_NAMES[split])
    return next((folder for folder in found if folder.is_dir()), path)
