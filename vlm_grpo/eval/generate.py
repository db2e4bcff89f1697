"""Generate outputs of examples by a policy or a server, with a log to resume from."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.eval.models import EvaluatedModel
from vlm_grpo.eval.prediction_log import OutputKey, PredictionLog
from vlm_grpo.eval.remote import Seed
from vlm_grpo.model.episodes import Begun, begin_episodes
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example

_LINE_SECONDS = 15.0  # between two progress lines when the output is not a terminal


def generate_all(
    model: EvaluatedModel,
    task: Task,
    examples: Sequence[Example],
    log: PredictionLog | None = None,
    places: Sequence[int] | None = None,
) -> tuple[list[Example], list[Completion]]:
    """Generate ``evaluation.samples`` outputs per example, and return all on every rank.

    Rank r of n generates every n-th chunk, starting with chunk r, of those that are not in the log,
    which is finished here. The outputs of an example depend on the seed and on its index, not on
    the rank. Examples that the model cannot use are named before any output is generated.
    ``places`` are the indices that stand in the examples' seeds; None: their own.

    Returns:
        The examples with the resized sizes of their images and what their environment shows first,
        and their outputs, of which texts and turns are kept: all of the first example, then all of
        the second, and so on. With a log, the images that they observed have no pixels.
    """
    state = initialize_distributed()
    usable = model.prompts.select_usable(examples, task)
    begun = list[Begun]()
    with fail_together(state):
        begun = [begin_episodes(model.prompts, model.runner, example, task) for example in usable]
    resized = [example for example, _ in begun]
    numbers = range(model.settings.evaluation.samples)
    items = [example for example in resized for _ in numbers]
    keys = [(example.id, number) for example in resized for number in numbers]
    outputs: dict[OutputKey, Completion] = {}
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
        for index in (places or range(len(resized)))
        for number in numbers
    ]
    with fail_together(state):
        results = model.generate(task, [own for own in begun for _ in numbers], seeds, own)
        if state.is_main_process and log is not None:
            results = _show_progress(results, sum(map(len, own)), len(items) // state.num_processes)
        for chunk, completions in results:
            batch = keys[chunk.start : chunk.stop]
            found = [Completion.from_text(c.text, turns=c.turns) for c in completions]
            if log is not None:
                found = log.append(batch, items[chunk.start : chunk.stop], found)
            outputs |= zip(batch, found, strict=True)
    outputs = dict(gather_object(list(outputs.items())))
    every_output = [outputs[key] for key in keys]
    if log is not None:
        if state.is_main_process:
            log.finish(keys, items, every_output)
        state.wait_for_everyone()
    return resized, every_output


def generate_runs(
    model: EvaluatedModel, task: Task, examples: Sequence[Example], log: PredictionLog | None = None
) -> list[tuple[Task, list[Example], list[Completion]]]:
    """Return the task and what ``generate_all`` returns; then, of the examples that have an
    environment, the same without its tools, from the same seeds."""
    runs = [(task, *generate_all(model, task, examples, log))]
    own = [*enumerate(runs[0][1])]
    if own := [(i, e) for i, e in own if task.resolve(e)[1].environment is not None]:
        places, given = zip(*own, strict=True)
        plain, log = task.without_tools(), None if log is None else log.without_tools()
        runs.append((plain, *generate_all(model, plain, given, log, places)))
    return runs


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
