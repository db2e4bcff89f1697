"""Outputs on disk: the log from which a stopped evaluation goes on, and files to score again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_grpo.config.base import flatten
from vlm_grpo.data.jsonl import read_jsonl
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import append_durable, write_atomic


class PredictionLog:
    """Outputs on disk as they come, from which a stopped evaluation goes on.

    Each process writes ``folder/predictions-N.jsonl`` and all of these are read, whatever the
    number of processes was; ``finish`` makes the one ``folder/predictions.jsonl`` of them, a line
    ``{"id", "output", "seen"}`` for each example, which ``vlm-grpo score`` reads too.

    Args:
        folder: of this evaluation.
        request: what decides the outputs: model, checkpoint, task, prompts, limits, seed.
        rank: number of this process; the first is to be made before the others.

    Raises:
        UserError: the folder holds the outputs of another request.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], rank: int = 0) -> None:
        self.folder = folder
        text = json.dumps(request, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "request.json"
        if mark.exists() and (other := _differences(mark, digest, json.loads(text))):
            raise UserError(
                f"{folder} holds predictions that were made otherwise:\n{bullets(other, 10)}\n"
                "name another folder by name=…, or delete it"
            )
        if rank == 0:
            record = {"digest": digest, "request": json.loads(text)}
            write_atomic(mark, json.dumps(record, indent=1).encode())
        self.path = folder / "predictions.jsonl"
        self.part = folder / f"predictions-{rank}.jsonl"
        self.outputs: dict[str, str] = {}
        for path in sorted(folder.glob("predictions*.jsonl")):
            rows = _whole_lines(path, mend=path == self.part)
            self.outputs |= {row["id"]: row["output"] for row in rows}

    def share(self, outputs: Iterable[tuple[str, str]]) -> None:
        """Take over what the other processes have read: id and output."""
        self.outputs |= dict(outputs)

    def lacks(self, examples: Sequence[Example]) -> bool:
        """Whether some of the examples have no output.

        Whole parts are done again, so that every example meets the same neighbours as in an
        unbroken run and gets the same output.
        """
        return any(example.id not in self.outputs for example in examples)

    def add(self, examples: Sequence[Example], outputs: Sequence[str]) -> None:
        """Write a part's outputs; a process that is killed after this has lost none of them."""
        self.outputs |= {e.id: output for e, output in zip(examples, outputs, strict=True)}
        lines = "".join(_lines(examples, outputs))
        append_durable(self.part, lines.encode(errors="backslashreplace"))

    def finish(self, examples: Sequence[Example], outputs: Sequence[str]) -> None:
        """Write the whole file, in the examples' order, in place of all processes' parts."""
        write_atomic(
            self.path, "".join(_lines(examples, outputs)).encode(errors="backslashreplace")
        )
        for path in self.folder.glob("predictions-*.jsonl"):
            path.unlink()


def _lines(examples: Sequence[Example], outputs: Sequence[str]) -> Iterator[str]:
    for example, output in zip(examples, outputs, strict=True):
        seen = [list(image.resized_size) for image in example.images]
        row = {"id": example.id, "output": output, "seen": seen}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _differences(mark: Path, digest: str, request: Mapping[str, Any]) -> list[str]:
    """The settings in which the mark's request differs from this one."""
    try:
        held = json.loads(mark.read_text("utf-8"))
        if held["digest"] == digest:
            return []
        old, new = flatten(held["request"]), flatten(request)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{mark.name} cannot be read"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in names]


def _whole_lines(path: Path, mend: bool) -> Iterator[dict[str, Any]]:
    """The file's rows; a torn last line is cut off where ``mend`` is set, else passed over."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    for line in whole.splitlines():
        yield json.loads(line)


def read_predictions(
    path: Path, examples: Sequence[Example], needs_resized_size: bool = False
) -> tuple[list[Example], list[str]]:
    """The outputs of a predictions file, one for each example, in the examples' order.

    Args:
        path: JSON Lines of ``{"id": …, "output": …[, "seen": [[width, height], …]]}``.
        examples: the rows that were asked.
        needs_seen: every line must tell the sizes at which the model saw the images.

    Returns:
        The examples with the ``seen`` sizes of the file, where it has them, and the outputs.

    Raises:
        UserError: a line is malformed, or ids do not match one to one; all problems are named.
    """
    wanted = {example.id: example for example in examples}
    found: dict[str, Mapping[str, Any]] = {}
    problems: list[str] = []
    for row in read_jsonl(path):
        identity, output = row.values.get("id"), row.values.get("output")
        if isinstance(identity, int) and not isinstance(identity, bool):
            identity = str(identity)
        if row.problem is not None:
            problems.append(f"{row.location}: {row.problem}")
        elif not isinstance(identity, str) or not isinstance(output, str):
            problems.append(f'{row.location}: a prediction is {{"id": …, "output": text}}')
        elif identity not in wanted:
            problems.append(f"{row.location}: no example has the id {identity!r}")
        elif identity in found:
            problems.append(f"{row.location}: id {identity!r} has a prediction already")
        else:
            if needs_resized_size and not _valid_sizes(row.values.get("seen"), wanted[identity]):
                problems.append(
                    f'{row.location}: --frame resized needs "seen": [[width, height]], one pair '
                    "per image"
                )
            found[identity] = row.values
    missing = [f"{path}: no prediction for id {name!r}" for name in wanted if name not in found]
    if problems or missing:
        raise UserError(
            f"the predictions do not match the examples, one to one:\n"
            f"{bullets([*problems, *missing])}"
        )
    seen = [_with_seen(example, found[example.id].get("seen")) for example in examples]
    return seen, [found[example.id]["output"] for example in examples]


def _valid_sizes(sizes: Any, example: Example) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) == len(example.images)
        and all(isinstance(size, list) and len(size) == 2 for size in sizes)
        and all(isinstance(side, int) and side > 0 for size in sizes for side in size)
    )


def _with_seen(example: Example, sizes: Any) -> Example:
    """The example with the sizes at which the model saw its images, where they are told."""
    if not _valid_sizes(sizes, example):
        return example
    pairs = zip(example.images, sizes, strict=True)
    images = tuple(replace(image, resized_size=(width, height)) for image, (width, height) in pairs)
    return replace(example, images=images)
