"""The log of outputs, from which a stopped evaluation resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import Split
from vlm_grpo.config.section import flatten
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.eval.models import EvaluatedModel
from vlm_grpo.eval.outputs import format_output, read_output
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example
from vlm_grpo.utils.atomic_io import append_durable, write_atomic
from vlm_grpo.utils.jsonl import format_rows, read_rows

OutputKey = tuple[str, int]  # the id of an example, and the number of its output, from 0
# Settings that change the outputs, in addition to those of ``evaluation`` and ``data``.
_REQUEST_SETTINGS = {
    *("model", "model_revision", "seed", "task_options"),
    *("policy", "prompt", "rollout"),
}


class PredictionLog:
    """A log of outputs, from which a stopped evaluation of the same request resumes.

    Each process writes ``predictions-N.jsonl`` and reads those of all processes, however many there
    were. ``finish`` merges them into ``predictions.jsonl`` with a line per example: "id", "output"
    and "seen", the resized sizes of the images; further outputs of an example have their number as
    "sample", episodes their "turns" (``format_output``). Process 0 must create its log first.
    ``outputs`` are those that were read.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], rank: int = 0) -> None:
        self.folder, self.request, self.rank = folder, request, rank
        folder.mkdir(parents=True, exist_ok=True)
        request_path = folder / "request.json"
        values = json.loads(json.dumps(request, sort_keys=True, default=str))
        if request_path.exists() and (other := _list_differences(request_path, values)):
            raise UserError(
                f"{folder} has predictions of another evaluation:\n{bullets(other, 10)}\n"
                "choose another folder with name=…, or delete this one"
            )
        if rank == 0:
            write_atomic(request_path, json.dumps({"request": values}, indent=1).encode())
        self.path = folder / "predictions.jsonl"
        self.rank_path = folder / f"predictions-{rank}.jsonl"
        self.outputs: dict[OutputKey, Completion] = {}
        for path in sorted(folder.glob("predictions*.jsonl")):
            rows = read_rows(path, truncate=path == self.rank_path)
            self.outputs |= {(row["id"], row.get("sample", 0)): read_output(row) for row in rows}

    def without_tools(self) -> PredictionLog:
        """Open the log of the outputs of the same request without tools, in a folder within."""
        request = {**self.request, "without_tools": True}
        with initialize_distributed().main_process_first():
            return PredictionLog(self.folder / "without-tools", request, self.rank)

    def append(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[Completion]
    ) -> list[Completion]:
        """Write the outputs of a chunk, which then survive the end of the process; return them as
        they are read again."""
        append_durable(self.rank_path, _format_lines(keys, examples, outputs))
        return [read_output(format_output(output)) for output in outputs]

    def finish(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[Completion]
    ) -> None:
        """Write the file of all outputs, in this order, and delete the others."""
        write_atomic(self.path, _format_lines(keys, examples, outputs))
        for path in self.folder.glob("predictions-*.jsonl"):
            path.unlink()


def _format_lines(
    keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[Completion]
) -> bytes:
    rows = []
    for (_, number), example, output in zip(keys, examples, outputs, strict=True):
        sizes = [image.resized_size for image in example.images]
        sample = {"sample": number} if number else {}
        rows.append({"id": example.id, **sample, **format_output(output), "seen": sizes})
    return format_rows(rows)


def _list_differences(path: Path, request: Mapping[str, Any]) -> list[str]:
    try:
        old, new = flatten(json.loads(path.read_text("utf-8"))["request"]), flatten(request)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{path.name} cannot be read"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r} and is now {new.get(name)!r}" for name in names]


def open_log(
    folder: Path,
    model: EvaluatedModel,
    weights: Path | None,
    task: Task,
    examples: Sequence[Example],
    split: Split = "eval",
) -> PredictionLog:
    """Open the log of a model's outputs on every rank.

    Its request has everything that determines the outputs: settings, weights and prompts.
    """
    settings = model.settings
    request = settings.model_dump(mode="json", include=_REQUEST_SETTINGS)
    request["evaluation"] = settings.evaluation.model_dump(mode="json", exclude={"every"})
    request["data"] = settings.data.model_dump(mode="json", include={split, f"{split}_limit"})
    if model.served_name is not None:
        request["served_model"] = model.served_name
    prompts = hashlib.sha256()
    for example in examples:
        sizes = [image.size for image in example.images]
        texts = (task.prompt(example), *map(astuple, example.history))
        prompts.update(repr((example.id, *texts, sizes)).encode())
    files = sorted(weights.iterdir()) if weights else []
    states = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr(states).encode()).hexdigest()
    request |= {"weights": str(weights), "files": digest, "questions": prompts.hexdigest()}
    state = initialize_distributed()
    with state.main_process_first():
        return PredictionLog(folder, request, state.process_index)
