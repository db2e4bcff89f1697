"""Generate outputs of examples: in chunks, shared among the ranks, resumable."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.eval.predictions import OutputKey, PredictionLog
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.prompts import PromptWriter
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Prompt

CHUNK_PIXELS = 2**24
"""Pixels of resized images in memory at once: 0.4 GB in the Qwen families, which store each pixel
of a still image as two frames of three 32-bit numbers."""
CHUNK_EXAMPLES = 64
"""Maximum number of examples in a chunk, so that a few hundred small examples still make a chunk
for every rank."""
_LINE_SECONDS = 15.0
"""Seconds between two progress lines when the output is not a terminal."""

Seed = tuple[int | str, ...]
"""The parts of the seed of an example's random numbers."""


class EvaluatedModel(Protocol):
    """A model that is evaluated: a policy in this process, or a model behind an address."""

    prompts: PromptWriter
    settings: Settings
    identity: dict[str, str]  # what determines its outputs and is not in the settings

    def split(self, examples: Sequence[Example]) -> list[range]:
        """Split the indices of the examples of ``generate`` into chunks for it."""
        ...

    def generate(
        self, task: Task, examples: Sequence[Example], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        """Yield the chunks of ``todo`` in any order, with a completion of each item.

        An example that has no output is a ``UserError`` after all others.

        Args:
            task: writes the prompts.
            examples: examples with the resized sizes of their images, each ``evaluation.samples``
                times, one after the other.
            seeds: seed of each item; those of an example share a prefix.
            todo: the chunks to generate.
        """
        ...


class LocalModel:
    """A policy whose outputs are generated in this process."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.prompts: PromptWriter = policy.prompts
        self.identity: dict[str, str] = {}

    def split(self, examples: Sequence[Example]) -> list[range]:
        count = self.settings.evaluation.samples  # all samples of an example are in one chunk
        chunks = split_into_chunks(examples[::count])
        return [range(chunk.start * count, chunk.stop * count) for chunk in chunks]

    def generate(
        self, task: Task, examples: Sequence[Example], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        for chunk in todo:
            firsts = chunk[:: self.settings.evaluation.samples]
            prompts = [self.policy.prompts.build(examples[index], task) for index in firsts]
            chunk_seeds = [seeds[index] for index in firsts]
            yield chunk, generate(self.policy, prompts, self.settings, chunk_seeds)


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
    count = model.settings.evaluation.samples
    items = [example for example in resized for _ in range(count)]
    keys = [(example.id, number) for example in resized for number in range(count)]
    todo = model.split(items)
    outputs: dict[OutputKey, str] = {}
    if log is not None:
        # All ranks use what any of them has read, and none writes before all have read.
        log.add_outputs(gather_object(list(log.outputs.items())))
        todo = [chunk for chunk in todo if log.is_missing_any(keys[chunk.start : chunk.stop])]
        outputs = log.outputs
    own = todo[state.process_index :: state.num_processes]
    visible = state.is_main_process and log is not None
    counts = sum(map(len, own)), len(items) // state.num_processes
    # A policy adds the number of the sample to the seed of the first.
    start = model.settings.seed, "evaluation"
    seeds: list[Seed] = [
        (*start, index, number) if number else (*start, index)
        for index in range(len(resized))
        for number in range(count)
    ]
    with fail_together(state):
        results = model.generate(task, items, seeds, own)
        for chunk, completions in _show_progress(results, *counts, visible):
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


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: Settings,
    seeds: Sequence[Sequence[int | str]],
) -> list[Completion]:
    """Generate ``evaluation.samples`` completions of each prompt, one prompt after the other."""
    evaluation, rollout = settings.evaluation, settings.rollout
    distribution = replace(policy.distribution, temperature=evaluation.temperature)
    sampling = SamplingSettings(distribution, rollout.max_completion_length, rollout.stop)
    count, limit = evaluation.samples, evaluation.max_tokens_per_batch
    groups = policy.sample(prompts, sampling, count, seeds, limit)
    policy.engine.clear_image_features()
    return [completion for group in groups for completion in group]


def _show_progress(
    results: Iterable[tuple[range, list[Completion]]], remaining: int, total: int, visible: bool
) -> Iterator[tuple[range, list[Completion]]]:
    """Yield the results, and show a progress bar in a terminal or an occasional line elsewhere.

    ``total`` has the outputs of this rank that are done already, too.
    """
    done = max(0, total - remaining)
    total = done + remaining
    console = Console(stderr=True)
    columns = (TextColumn("outputs"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not (visible and console.is_terminal))
    if visible and remaining and done:
        print(f"resuming after {done} of {total} outputs", file=sys.stderr, flush=True)
    last = time.monotonic()
    with bar:
        row = bar.add_task("outputs", total=total, completed=done)
        for chunk, completions in results:
            yield chunk, completions
            done += len(chunk)
            bar.update(row, completed=done)
            if visible and bar.disable and time.monotonic() - last > _LINE_SECONDS:
                last = time.monotonic()
                print(f"{done}/{total} outputs", file=sys.stderr, flush=True)
