"""Outputs on disk: the log from which a stopped evaluation goes on, and files to score again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.files import append_whole, write_whole
from vlm_grpo.types import Example


class PredictionLog:
    """Outputs on disk as they come, from which a stopped evaluation goes on.

    ``folder/predictions.jsonl`` holds ``{"id", "output", "seen"}`` a line, which ``vlm-grpo score``
    reads too; with several processes each writes a file of its own and all are read.

    Args:
        folder: of this evaluation.
        request: what decides the outputs: model, checkpoint, task, prompt, limits, seed.
        rank: number of this process.

    Raises:
        UserError: the folder holds the outputs of another request.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        text = json.dumps(request, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "request.json"
        if mark.exists() and json.loads(mark.read_text())["digest"] != digest:
            raise UserError(
                f"{folder} holds predictions that were made under other settings: "
                "name another folder, or delete it"
            )
        if rank == 0:
            known = {"digest": digest, "request": json.loads(text)}
            write_whole(mark, json.dumps(known, indent=1).encode())
        suffix = f"-{rank}" if rank else ""
        self.path = folder / f"predictions{suffix}.jsonl"
        self.outputs: dict[str, str] = {}
        self.seen: dict[str, Any] = {}
        for path in sorted(folder.glob("predictions*.jsonl")):
            for row in _whole_lines(path, mend=path == self.path):
                self.outputs[row["id"]], self.seen[row["id"]] = row["output"], row["seen"]

    def add(self, examples: Sequence[Example], outputs: Sequence[str]) -> None:
        """Write a chunk's outputs; it is on disk when this returns."""
        lines = []
        for example, output in zip(examples, outputs, strict=True):
            seen = [list(image.seen) for image in example.images]
            self.outputs[example.id], self.seen[example.id] = output, seen
            row = {"id": example.id, "output": output, "seen": seen}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        append_whole(self.path, "".join(lines).encode())

    def missing(self, examples: Sequence[Example], chunk: int) -> list[int]:
        """Starts of the chunks that have no output for some example.

        Whole chunks are done again, so that every example meets the same neighbours as in an
        unbroken run and gets the same output.
        """
        starts = range(0, len(examples), chunk)
        return [
            start
            for start in starts
            if any(e.id not in self.outputs for e in examples[start : start + chunk])
        ]


def _whole_lines(path: Path, mend: bool) -> Iterator[dict[str, Any]]:
    """The file's rows; a torn last line is cut off where ``mend`` is set, else passed over."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for line in whole.splitlines():
        yield json.loads(line)


def read_predictions(path: Path, examples: Sequence[Example]) -> tuple[list[Example], list[str]]:
    """The outputs of a predictions file, one for each example, in the examples' order.

    Returns:
        The examples with the ``seen`` sizes of the file, where it has them, and the outputs.

    Raises:
        UserError: the file cannot be read, or lacks examples; up to 50 are named.
    """
    try:
        rows = {row["id"]: row for row in _whole_lines(path, mend=False)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path} holds no predictions, {{"id": …, "output": …}} a line: {error!r}'
        ) from error
    if missing := [e.id for e in examples if not isinstance(rows.get(e.id, {}).get("output"), str)]:
        raise UserError(f"{path} has no output for {len(missing)} examples:\n{bullets(missing)}")
    return [_with_seen(e, rows[e.id].get("seen")) for e in examples], [
        rows[e.id]["output"] for e in examples
    ]


def _with_seen(example: Example, sizes: Sequence[Sequence[int]] | None) -> Example:
    if not sizes:
        return example
    pairs = zip(example.images, sizes, strict=True)
    images = tuple(replace(image, seen=(size[0], size[1])) for image, size in pairs)
    return replace(example, images=images)
