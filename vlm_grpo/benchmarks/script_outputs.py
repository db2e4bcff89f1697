"""Outputs as files that the official script of a benchmark reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import create_whole_folder


def _name_by_page(identity: str) -> str:
    match = re.fullmatch(r"(.*)\.pdf-(\d+)", identity, re.DOTALL)
    pdf, page = match.groups() if match else (identity.removesuffix(".pdf"), 1)
    return f"{pdf}_pg{page}_repeat1.md"


FILE_NAMES: dict[str, Callable[[str], str]] = {
    "markdown": lambda identity: PurePosixPath(identity).stem + ".md",
    "pages": _name_by_page,
}
"""The path of an example's file, from its id, by the value of ``Benchmark.script_outputs``.

``markdown``: OmniDocBench, end2end_dataset.py; the id is the path of the page's image.
``pages``: olmOCR-Bench, olmocr/bench/benchmark.py; the id is the path of a PDF file and the number
of the page, ``scans/a.pdf-1``.
"""


def name_files(form: str, examples: Sequence[Example]) -> list[str]:
    """Return the path of each example's file in the folder, of the form ``FILE_NAMES[form]``."""
    names = [str(PurePosixPath(FILE_NAMES[form](example.id))) for example in examples]
    ids: dict[str, list[str]] = {}
    for name, example in zip(names, examples, strict=True):
        ids.setdefault(name, []).append(repr(example.id))
    problems = [
        f"{' and '.join(same)} would both be {name!r}"
        for name, same in ids.items()
        if len(same) > 1
    ]
    problems += [f"{same[0]} cannot be a file" for name, same in ids.items() if not _is_valid(name)]
    if problems:
        raise UserError(
            "the official script reads one file per example, named after its id; "
            f"change the ids:\n{bullets(problems)}"
        )
    return names


def _is_valid(name: str) -> bool:
    if name.startswith("/") or "\0" in name:
        return False
    try:
        # File systems take names of up to 255 bytes.
        return all(part != ".." and len(part.encode()) <= 255 for part in name.split("/"))
    except UnicodeEncodeError:  # half of a character, from JSON
        return False


def write_files(form: str, folder: Path, examples: Sequence[Example], texts: Sequence[str]) -> None:
    """Write one file per example into a folder, which is replaced as a whole."""
    names = name_files(form, examples)
    if folder.is_dir():
        shutil.rmtree(folder)
    with create_whole_folder(folder) as tmp_dir:
        for name, text in zip(names, texts, strict=True):
            path = tmp_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode(errors="backslashreplace"))
