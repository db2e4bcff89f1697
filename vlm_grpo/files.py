"""Writing a file whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place; nothing is left where that fails."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
