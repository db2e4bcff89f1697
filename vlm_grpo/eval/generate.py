"""Generate outputs of examples: in chunks, shared among the ranks, with a log to resume from."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlm_grpo.config.data import Split
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import flatten
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.eval.remote import RemoteModel, Seed
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.model.prompts import PromptWriter
from vlm_grpo.serve.chat import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example
from vlm_grpo.utils.atomic_io import append_durable, write_atomic
from vlm_grpo.utils.jsonl import read_rows

CHUNK_PIXELS = 2**24
"""Pixels of resized images in memory at once: 0.4 GB in the Qwen families, which store each pixel
of a still image as two frames of three 32-bit numbers."""
CHUNK_EXAMPLES = 64
"""Maximum number of examples in a chunk, so that a few hundred small examples still make a chunk
for every rank."""
_LINE_SECONDS = 15.0
"""Seconds between two progress lines when the output is not a terminal."""
_REQUEST_SETTINGS = {
    *("model", "model_revision", "seed", "task_options"),
    *("policy", "prompt", "rollout"),
}
"""Settings that change the outputs, in addition to those of ``evaluation`` and ``data``."""

OutputKey = tuple[str, int]
"""The id of an example, and the number of its output, from 0."""


class LocalModel:
    """A policy whose outputs are generated in this process."""

    served_name = None

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.prompts: PromptWriter = policy.prompts

    def split(self, examples: Sequence[Example]) -> list[range]:
        count = self.settings.evaluation.samples  # all samples of an example are in one chunk
        chunks = split_into_chunks(examples[::count])
        return [range(chunk.start * count, chunk.stop * count) for chunk in chunks]

    def generate(
        self, task: Task, examples: Sequence[Example], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        evaluation, rollout = self.settings.evaluation, self.settings.rollout
        distribution = replace(self.policy.distribution, temperature=evaluation.temperature)
        sampling = SamplingSettings(distribution, rollout.max_completion_length, rollout.stop)
        count, limit = evaluation.samples, evaluation.max_tokens_per_batch
        for chunk in todo:
            firsts = chunk[::count]
            prompts = [self.policy.prompts.build(examples[index], task) for index in firsts]
            chunk_seeds = [seeds[index] for index in firsts]
            groups = self.policy.sample(prompts, sampling, count, chunk_seeds, limit)
            self.policy.engine.clear_image_features()
            yield chunk, [completion for group in groups for completion in group]


EvaluatedModel = LocalModel | RemoteModel
"""A model that is evaluated.

``split`` splits the indices of examples, each ``evaluation.samples`` times, one after the other,
into chunks. ``generate`` yields those of ``todo`` in any order, with a completion of each index.
The examples have the resized sizes of their images; the seeds of one share a prefix. An example
without an output is a ``UserError`` after all others. ``served_name`` is None of a policy.
"""


def load_evaluated_model(
    settings: Settings, weights: Path | None = None, server: Endpoint | str | None = None
) -> EvaluatedModel:
    """Load a policy for evaluation on this process's device, or connect to a server.

    Without ``weights``, the folder of a checkpoint, they are those of ``settings.model``.
    """
    if server is not None:
        return RemoteModel(Endpoint(server) if isinstance(server, str) else server, settings)
    policy = load_policy(settings, weights, training=False)
    policy.model.to(initialize_distributed().device)
    return LocalModel(policy, settings)


def check_weights(checkpoint: Path | None, server: Endpoint | str | None) -> None:
    """Refuse a checkpoint beside a server, or one that is missing, before the data are read."""
    if checkpoint is not None and server is not None:
        raise UserError(
            "a server has its own weights: leave out the checkpoint, or the server; the settings "
            "of a run are those of its config.yaml, given as the recipe"
        )
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is not a folder")


def name_outputs(model: EvaluatedModel, weights: Path | None) -> str:
    """Return the name of the folder of a model's outputs in that of the run."""
    if model.served_name is not None:
        return "served-" + re.sub(r"[^\w.-]", "-", model.served_name)
    return weights.name if weights else "model"


def split_into_chunks(examples: Sequence[Example]) -> list[range]:
    """Split the examples' indices into chunks whose resized images fit into memory together.

    The split depends only on the examples, not on the ranks or on the progress so far, so that an
    example is batched with the same examples in every run and gets the same output.
    """
    chunks: list[range] = []
    start = pixels = 0
    for index, example in enumerate(examples):
        added = sum(math.prod(i.resized_size) * max(1, i.num_frames) for i in example.images)
        full = pixels + added > CHUNK_PIXELS or index - start == CHUNK_EXAMPLES
        if full and index > start:
            chunks.append(range(start, index))
            start, pixels = index, 0
        pixels += added
    if examples:
        chunks.append(range(start, len(examples)))
    return chunks


def generate_all(
    model: EvaluatedModel,
    task: Task,
    examples: Sequence[Example],
    log: PredictionLog | None = None,
) -> tuple[list[Example], list[str]]:
    """Generate ``evaluation.samples`` outputs per example, and return all on every rank.

    Rank r of n generates every n-th chunk, starting with chunk r, of those that are not in the log,
    which is finished here. The outputs of an example depend on the seed and on its index, not on
    the rank. Examples that the model cannot use are named before any output is generated.

    Returns:
        The examples with the resized sizes of their images, and their outputs: all of the first
        example, then all of the second, and so on.
    """
    state = initialize_distributed()
    usable = model.prompts.select_usable(examples, task)
    resized = [model.prompts.with_resized_sizes(example) for example in usable]
    numbers = range(model.settings.evaluation.samples)
    items = [example for example in resized for _ in numbers]
    keys = [(example.id, number) for example in resized for number in numbers]
    outputs: dict[OutputKey, str] = {}
    if log is not None:
        # All ranks use what any of them has read, and none writes before all have read.
        outputs = dict(gather_object(list(log.outputs.items())))
    # An incomplete chunk is generated again in full, so that every example is batched with the same
    # examples as in an uninterrupted run and gets the same output.
    chunks = [chunk for chunk in model.split(items) if any(keys[i] not in outputs for i in chunk)]
    own = chunks[state.process_index :: state.num_processes]
    # A policy adds the number of the sample to the seed of the first.
    seeds: list[Seed] = [
        (model.settings.seed, "evaluation", index, *([number] if number else []))
        for index in range(len(resized))
        for number in numbers
    ]
    with fail_together(state):
        results = model.generate(task, items, seeds, own)
        if state.is_main_process and log is not None:
            results = _show_progress(results, sum(map(len, own)), len(items) // state.num_processes)
        for chunk, completions in results:
            batch, texts = keys[chunk.start : chunk.stop], [c.text for c in completions]
            outputs |= zip(batch, texts, strict=True)
            if log is not None:
                log.append(batch, items[chunk.start : chunk.stop], texts)
    outputs = dict(gather_object(list(outputs.items())))
    texts = [outputs[key] for key in keys]
    if log is not None:
        if state.is_main_process:
            log.finish(keys, items, texts)
        state.wait_for_everyone()
    return resized, texts


def _show_progress(
    results: Iterable[tuple[range, list[Completion]]], remaining: int, total: int
) -> Iterator[tuple[range, list[Completion]]]:
    """Yield the results, and show a progress bar in a terminal or an occasional line elsewhere.

    ``total`` has the outputs of this rank that are done already, too.
    """
    done = max(0, total - remaining)
    total = done + remaining
    console = Console(stderr=True)
    columns = (TextColumn("outputs"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    if remaining and done:
        print(f"resuming after {done} of {total} outputs", file=sys.stderr, flush=True)
    last = time.monotonic()
    with bar:
        row = bar.add_task("outputs", total=total, completed=done)
        for chunk, completions in results:
            yield chunk, completions
            done += len(chunk)
            bar.update(row, completed=done)
            if bar.disable and time.monotonic() - last > _LINE_SECONDS:
                last = time.monotonic()
                print(f"{done}/{total} outputs", file=sys.stderr, flush=True)


class PredictionLog:
    """A log of outputs, from which a stopped evaluation of the same request resumes.

    Each process writes ``predictions-N.jsonl`` and reads those of all processes, however many there
    were. ``finish`` merges them into ``predictions.jsonl`` with a line per example: "id", "output"
    and "seen", the resized sizes of the images; further outputs of an example have their number as
    "sample". Process 0 must create its log first. ``outputs`` are those that were read.
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

    def append(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
    ) -> None:
        """Write the outputs of a chunk, which then survive the end of the process."""
        append_durable(self.rank_path, _format_lines(keys, examples, outputs))

    def finish(
        self, keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
    ) -> None:
        """Write the file of all outputs, in this order, and delete the others."""
        write_atomic(self.path, _format_lines(keys, examples, outputs))
        for path in self.folder.glob("predictions-*.jsonl"):
            path.unlink()


def _format_lines(
    keys: Sequence[OutputKey], examples: Sequence[Example], outputs: Sequence[str]
) -> bytes:
    lines = []
    for (_, number), example, output in zip(keys, examples, outputs, strict=True):
        sizes = [list(image.resized_size) for image in example.images]
        sample = {"sample": number} if number else {}
        row = {"id": example.id, **sample, "output": output, "seen": sizes}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines).encode(errors="backslashreplace")


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


def open_log(
    folder: Path,
    model: EvaluatedModel,
    weights: Path | None,
    task: Task,
    examples: Sequence[Example],
    split: Split = "eval",
) -> PredictionLog:
    """Open the log of a model's outputs on every rank."""
    request = build_request(model.settings, weights, task, examples, split)
    if model.served_name is not None:
        request["served_model"] = model.served_name
    state = initialize_distributed()
    with state.main_process_first():
        return PredictionLog(folder, request, state.process_index)


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
