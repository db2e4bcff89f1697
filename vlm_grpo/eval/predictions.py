"""Outputs on disk: a log from which a stopped evaluation resumes, and files of predictions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import Split
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import flatten
from vlm_grpo.data.files import read_jsonl
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import append_durable, write_atomic
from vlm_grpo.utils.jsonl import read_rows

_REQUEST_SETTINGS = {
    *("model", "model_revision", "seed", "task_options"),
    *("policy", "prompt", "rollout"),
}
"""Settings that change the outputs, in addition to those of ``evaluation`` and ``data``."""

OutputKey = tuple[str, int]
"""The id of an example, and the number of its output, from 0."""


class PredictionLog:
    """A log of outputs, from which a stopped evaluation of the same request resumes.

    Each process writes ``predictions-N.jsonl`` and reads those of all processes, however many there
    were. ``finish`` merges them into ``predictions.jsonl`` with a line per example: "id", "output"
    and "seen", the resized sizes of the images; further outputs of an example have their number as
    "sample". Process 0 must create its log first.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], rank: int = 0) -> None:
        self.folder = folder
        text = json.dumps(request, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        request_path = folder / "request.json"
        values = json.loads(text)
        if request_path.exists() and (other := _list_differences(request_path, digest, values)):
            raise UserError(
                f"{folder} has predictions of another evaluation:\n{bullets(other, 10)}\n"
                "choose another folder with name=…, or delete this one"
            )
        if rank == 0:
            content = {"digest": digest, "request": values}
            write_atomic(request_path, json.dumps(content, indent=1).encode())
        self.path = folder / "predictions.jsonl"
        self.rank_path = folder / f"predictions-{rank}.jsonl"
        self.outputs: dict[OutputKey, str] = {}
        for path in sorted(folder.glob("predictions*.jsonl")):
            rows = read_rows(path, truncate=path == self.rank_path)
            self.outputs |= {(row["id"], row.get("sample", 0)): row["output"] for row in rows}

    def add_outputs(self, outputs: Iterable[tuple[OutputKey, str]]) -> None:
        self.outputs |= dict(outputs)

    def is_missing_any(self, keys: Sequence[OutputKey]) -> bool:
        # An incomplete chunk is generated again in full, so that every example is batched with the
        # same examples as in an uninterrupted run and gets the same output.
        return any(key not in self.outputs for key in keys)

    def append(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
    ) -> None:
        """Write the outputs of a chunk, which then survive the end of the process."""
        self.outputs |= zip(keys, outputs, strict=True)
        lines = "".join(_format_lines(keys, examples, outputs))
        append_durable(self.rank_path, lines.encode(errors="backslashreplace"))

    def finish(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
    ) -> None:
        """Write the file of all outputs, in this order, and delete the others."""
        lines = "".join(_format_lines(keys, examples, outputs))
        write_atomic(self.path, lines.encode(errors="backslashreplace"))
        for path in self.folder.glob("predictions-*.jsonl"):
            path.unlink()


def build_request(
    settings: Settings,
    weights: Path | None,
    task: Task,
    examples: Sequence[Example],
    split: Split = "eval",
) -> dict[str, Any]:
    """Return everything that determines the outputs: settings, weights and prompts."""
    chosen = settings.model_dump(mode="json", include=_REQUEST_SETTINGS)
    chosen["evaluation"] = settings.evaluation.model_dump(mode="json", exclude={"every"})
    chosen["data"] = settings.data.model_dump(mode="json", include={split, f"{split}_limit"})
    prompts = hashlib.sha256()
    for example in examples:
        sizes = [image.size for image in example.images]
        texts = (task.prompt(example), *map(astuple, example.history))
        prompts.update(repr((example.id, *texts, sizes)).encode())
    files = sorted(weights.iterdir()) if weights else []
    states = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr(states).encode()).hexdigest()
    more = {"weights": str(weights), "files": digest, "questions": prompts.hexdigest()}
    return {**chosen, **more}


def _format_lines(
    keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
) -> Iterator[str]:
    for (_, number), example, output in zip(keys, examples, outputs, strict=True):
        sizes = [list(image.resized_size) for image in example.images]
        sample = {"sample": number} if number else {}
        row = {"id": example.id, **sample, "output": output, "seen": sizes}
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _list_differences(path: Path, digest: str, request: Mapping[str, Any]) -> list[str]:
    try:
        saved = json.loads(path.read_text("utf-8"))
        if saved["digest"] == digest:
            return []
        old, new = flatten(saved["request"]), flatten(request)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{path.name} cannot be read"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r} and is now {new.get(name)!r}" for name in names]


def read_predictions(
    path: Path, examples: Sequence[Example], needs_resized_size: bool = False
) -> tuple[list[Example], list[str]]:
    """Read one output per example from lines of ``{"id", "output"[, "seen": [[width, height]]]}``.

    The examples are returned with the resized sizes in "seen", which ``needs_resized_size`` asks
    of every line.
    """
    by_id = {example.id: example for example in examples}
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
        elif identity not in by_id:
            problems.append(f"{row.location}: no example has the id {identity!r}")
        elif identity in found:
            problems.append(f"{row.location}: id {identity!r} has a prediction already")
        else:
            if needs_resized_size and not _are_valid_sizes(row.values.get("seen"), by_id[identity]):
                problems.append(
                    f'{row.location}: --frame resized needs "seen": [[width, height]], one pair '
                    "per image"
                )
            found[identity] = row.values
    missing = [f"{path}: no prediction for id {name!r}" for name in by_id if name not in found]
    if problems or missing:
        raise UserError(
            f"the predictions and the examples do not match one to one:\n"
            f"{bullets([*problems, *missing])}"
        )
    resized = []
    for example in examples:
        sizes: Any = found[example.id].get("seen")
        if _are_valid_sizes(sizes, example):
            example = example.with_resized_sizes([(w, h) for w, h in sizes])
        resized.append(example)
    return resized, [found[example.id]["output"] for example in examples]


def _are_valid_sizes(sizes: Any, example: Example) -> bool:
    has_all = isinstance(sizes, list) and len(sizes) == len(example.images)
    return has_all and all(map(is_size, sizes))


def is_size(value: Any) -> bool:
    """Return whether a value from JSON has two sides in pixels."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(side, int) and side > 0 for side in value)
