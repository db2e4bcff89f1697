"""The guides and their commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read_commands(guide: Path) -> list[str]:
    """Return the commands of a guide's ``sh`` blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
