"""One output of a policy for every example: a part at a time, each rank its share, resumable."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.launch import initialize_distributed
from vlm_grpo.engine.sampling import SamplingSettings
from vlm_grpo.evaluation.predictions import PredictionLog
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Prompt

PART_PIXELS = 2**24
"""Pixels, as the model sees them, that are in memory at once: 0.4 GB in the Qwen families, which
hold each pixel of a still image as two frames of three 32-bit numbers."""
PART_EXAMPLES = 64
"""Examples of one part at most, so that a few hundred small ones still make a share for each
rank."""
_LINE_SECONDS = 15.0
"""Between two lines where the output is no terminal."""


def parts(examples: Sequence[Example]) -> list[range]:
    """Places of the examples, cut into parts that fit into memory together.

    The cut depends on the examples alone, not on the ranks and not on what is done already, so an
    example has the same neighbours in every run and gets the same output. A larger image than
    ``PART_PIXELS`` is a part of its own.

    Args:
        examples: with their images' ``seen`` sizes.
    """
    found: list[range] = []
    start = pixels = 0
    for place, example in enumerate(examples):
        own = sum(width * height for width, height in (i.resized_size for i in example.images))
        full = pixels + own > PART_PIXELS or place - start == PART_EXAMPLES
        if full and place > start:
            found.append(range(start, place))
            start, pixels = place, 0
        pixels += own
    if examples:
        found.append(range(start, len(examples)))
    return found


def generate_all(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    settings: Settings,
    log: PredictionLog | None = None,
) -> tuple[list[Example], list[str]]:
    """The policy's output for every example, at ``evaluation.temperature``, on every rank.

    Each rank takes every n-th part of those that are not in the log. What is sampled for an
    example depends on the seed and its place among the examples, not on the rank.

    Args:
        policy: what answers.
        task: what asks.
        examples: all of them, the same on every rank.
        settings: the run's.
        log: where outputs are kept as they come, and what it holds is not asked again; None:
            nowhere. It is finished here: its one file holds all outputs in the examples' order.

    Returns:
        The examples, their images' ``seen`` sizes set, and an output for each.
    """
    state = initialize_distributed()
    seen = [policy.with_resized_sizes(example) for example in examples]
    todo = parts(seen)
    outputs: dict[str, str] = {}
    if log is not None:
        # All ranks go by what all of them have read, and none writes before all have.
        log.share(gather_object(list(log.outputs.items())))
        todo = [part for part in todo if log.lacks(seen[part.start : part.stop])]
        outputs = log.outputs
    mine = todo[state.process_index :: state.num_processes]
    shown = state.is_main_process and log is not None
    for part in _with_progress(mine, len(examples) // state.num_processes, shown):
        chunk = seen[part.start : part.stop]
        prompts = [policy.build_prompt(example, task) for example in chunk]
        seeds = [(settings.seed, "evaluation", place) for place in part]
        texts = [drawn.text for drawn in generate(policy, prompts, settings, seeds)]
        outputs |= {example.id: text for example, text in zip(chunk, texts, strict=True)}
        if log is not None:
            log.add(chunk, texts)
    outputs = dict(gather_object(list(outputs.items())))
    texts = [outputs[example.id] for example in examples]
    if log is not None:
        if state.is_main_process:
            log.finish(seen, texts)
        state.wait_for_everyone()
    return seen, texts


def generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: Settings,
    seeds: Sequence[Sequence[int | str]],
) -> list[Completion]:
    """One completion of each prompt at ``evaluation.temperature``.

    Args:
        policy: what answers.
        prompts: as the policy made them.
        settings: the run's.
        seeds: for each prompt, what names its stream of random numbers.
    """
    evaluation, rollout = settings.evaluation, settings.rollout
    distribution = replace(policy.distribution, temperature=evaluation.temperature)
    sampling = SamplingSettings(distribution, rollout.max_completion_length, rollout.stop)
    drawn = policy.sample(prompts, sampling, 1, seeds, evaluation.max_tokens_per_batch)
    policy.clear_image_cache()
    return [completion for (completion,) in drawn]


def _with_progress(todo: Sequence[range], total: int, shown: bool) -> Iterator[range]:
    """The parts, with a bar in a terminal and a line now and then elsewhere.

    Args:
        todo: this rank's parts.
        total: this rank's examples, those that are done already included.
        shown: False: no bar and no lines.
    """
    left = sum(map(len, todo))
    done = max(0, total - left)
    total = done + left
    console = Console(stderr=True)
    columns = (TextColumn("examples"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
    if shown and left and done:
        print(f"going on after {done} of {total} examples", file=sys.stderr, flush=True)
    last = time.monotonic()
    with bar:
        row = bar.add_task("examples", total=total, completed=done)
        for part in todo:
            yield part
            done += len(part)
            bar.update(row, completed=done)
            if shown and bar.disable and time.monotonic() - last > _LINE_SECONDS:
                last = time.monotonic()
                print(f"{done}/{total} examples", file=sys.stderr, flush=True)
