"""The files of a new task: one that runs as it stands, and its test."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template

from vlm_grpo.errors import UserError

_FILES = {"{}.py": "task.py.txt", "test_{}.py": "test_task.py.txt"}
"""Files to write, by the name of their template."""
LONGEST_NAME = 40
"""Letters of a name; a longer one would not fit the templates' lines."""


def write_task(name: str, folder: Path) -> list[Path]:
    """Write ``NAME.py`` and ``test_NAME.py``; neither may exist yet.

    Args:
        name: the file's name without ``.py``, as ``read_clock``.
        folder: where to; made if it does not exist.

    Returns:
        The task's file and its test's.

    Raises:
        UserError: the name is no module's name, a file is there already, or the folder cannot be
            written to. Nothing has been written then.
    """
    _check_name(name)
    words = name.split("_")
    values = {
        "name": name,
        "title": " ".join(words).strip().capitalize(),
        "class_name": "".join(word.capitalize() for word in words),
    }
    templates = resources.files("vlm_grpo") / "templates"
    texts = {
        folder / file.format(name): Template((templates / template).read_text("utf-8")).substitute(
            values
        )
        for file, template in _FILES.items()
    }
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise UserError(f"{' and '.join(there)} exists: give another name, or another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:  # "x": never over another's file
                file.write(text)
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written to: {error.strerror}") from error
    return list(texts)


def _check_name(name: str) -> None:
    """Refuse a name that is no module's, or that would hide another module from Python."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UserError(
            f"{name!r} is no name for a task: use small letters, digits and single underscores, "
            "a letter first, as read_clock"
        )
    if len(name) > LONGEST_NAME:
        raise UserError(f"{name!r} is too long for a task's name: {LONGEST_NAME} letters at most")
    if keyword.iskeyword(name):
        raise UserError(f"{name!r} is a word of Python itself: give another name")
    if name in sys.stdlib_module_names:
        raise UserError(
            f"{name!r} is a module of Python's own, which {name}.py would hide: give another name"
        )
    if name.startswith("test_"):
        raise UserError(f"{name!r} would be taken for a test: leave out test_")
