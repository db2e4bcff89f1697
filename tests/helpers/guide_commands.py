"""The guides and their commands."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read_blocks(guide: Path, language: str) -> list[str]:
    """Return the text of each of a guide's blocks in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, guide.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def read_commands(guide: Path) -> list[str]:
    """Return the commands of a guide's ``sh`` blocks, without comments."""
    lines = "".join(read_blocks(guide, "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run_blocks(guide: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a guide's Python blocks in order, with changes of texts that occur once; return the names
    that they define."""
    text, names = guide.read_text("utf-8"), dict[str, Any](__name__="__main__")
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(guide), "exec"), names)
    return names
