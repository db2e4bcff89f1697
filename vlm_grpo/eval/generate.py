"""Generate outputs of examples by a policy or a server, with a log to resume from.

A policy generates in chunks, shared among the ranks; a server gets one request per output, several
at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.data import Split
from vlm_grpo.config.prompt import THINKING_SWITCHES
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import flatten
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError, bullets, list_bad_rows
from vlm_grpo.eval.outputs import format_output, read_output
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.episodes import Begun, begin_episodes, sample_episodes
from vlm_grpo.model.families.family import PixelBudget
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter
from vlm_grpo.model.resolve import UNKNOWN
from vlm_grpo.serve.chat import Answer, ChatClient, Endpoint, build_messages, encode_clip
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import ORIGINAL
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.types import Completion, EpisodeTurn, Example, VideoRef
from vlm_grpo.utils.atomic_io import append_durable, write_atomic
from vlm_grpo.utils.chat import Turn
from vlm_grpo.utils.http_json import LONGEST_WAIT, ServiceError
from vlm_grpo.utils.jsonl import format_rows, read_rows
from vlm_grpo.utils.remote_calls import call_each

logger = logging.getLogger(__name__)

# Pixels of resized images in memory at once: 0.4 GB in the Qwen families, which store each pixel of
# a still image as two frames of three 32-bit numbers.
CHUNK_PIXELS = 2**24
CHUNK_EXAMPLES = 64  # at most, so that a few hundred small examples make a chunk for every rank
_LINE_SECONDS = 15.0  # between two progress lines when the output is not a terminal
# Settings that change the outputs, in addition to those of ``evaluation`` and ``data``.
_REQUEST_SETTINGS = {
    *("model", "model_revision", "seed", "task_options"),
    *("policy", "prompt", "rollout"),
}
# Failed examples, without an answer between them, after which no more are asked; at least as many
# as are asked at once. Those that a server is too dead to answer, by ``_DEAD``, suffice in pairs.
FAILURES_IN_A_ROW = 8
_DEAD = (None, 502, 503, 504)  # no response, or that of a proxy
_CHECKED_PROMPTS = 16  # whose length is compared with the server's count
_REFUSED = (400, 413, 422)  # status codes with which servers refuse one prompt, such as a long one
# Fields of vLLM and SGLang that leave a stop string in the text, as a policy does.
_KEEP_STOP = {"include_stop_str_in_output": True, "no_stop_trim": True}
# Fields that undo the model's own generation defaults, which servers of weights apply.
_NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}

OutputKey = tuple[str, int]  # the id of an example, and the number of its output, from 0
Seed = tuple[int | str, ...]  # the parts of the seed of an example's random numbers


class LocalModel:
    """A policy whose outputs are generated in this process."""

    served_name = None

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.runner = EnvironmentRunner(settings.rollout.reward_workers)
        self.prompts: PromptWriter = policy.prompts

    def split(self, examples: Sequence[Example]) -> list[range]:
        count = self.settings.evaluation.samples  # all samples of an example are in one chunk
        chunks = split_into_chunks(examples[::count])
        return [range(chunk.start * count, chunk.stop * count) for chunk in chunks]

    def generate(
        self, task: Task, begun: Sequence[Begun], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        evaluation, rollout = self.settings.evaluation, self.settings.rollout
        distribution = replace(self.policy.distribution, temperature=evaluation.temperature)
        sampling = SamplingSettings(distribution, rollout.max_completion_length, rollout.stop)
        count, limit = evaluation.samples, evaluation.max_tokens_per_batch
        builder, policy = self.policy.prompts, self.policy
        for chunk in todo:
            pairs = [begun[index] for index in chunk[::count]]
            prompts = [replace(builder.build(e, task), start=start) for e, start in pairs]
            groups = sample_episodes(
                prompts,
                sampling,
                [range(count)] * len(prompts),
                [seeds[index] for index in chunk[::count]],
                lambda p, s, n, k, begun: policy.sample(p, s, n, k, limit, begun=begun),
                builder,
                self.runner,
            )
            self.policy.engine.clear_image_features()
            yield chunk, [completion for group in groups for completion in group]


class RemoteModel:
    """A model behind an address.

    Its messages and images are those of the model that the settings name, whose processor is
    loaded here. If they name ``none``, images keep their size unless ``policy.min_pixels`` or
    ``max_pixels`` limit it, and the server's own defaults of sampling hold.
    """

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        if initialize_distributed().num_processes > 1:
            raise UserError(
                "--server needs one process, which sends several requests at once (--concurrency): "
                "start it without a launcher"
            )
        self.endpoint, self.settings = endpoint, settings
        self.runner = EnvironmentRunner(settings.rollout.reward_workers)
        self.prompts = _load_prompts(endpoint, settings)
        self.client = ChatClient(endpoint)
        self.served_name = self.client.model
        self._options = self._build_options()
        self._unchecked = _CHECKED_PROMPTS

    def split(self, examples: Sequence[Example]) -> list[range]:
        # An output does not depend on the other examples.
        return [range(index, index + 1) for index in range(len(examples))]

    def generate(
        self, task: Task, begun: Sequence[Begun], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        examples = [example for example, _ in begun]
        indices = [index for chunk in todo for index in chunk]
        is_several = len(indices) > 1
        if is_several:
            known = self.settings.model
            prompts = "images in their own size" if known == UNKNOWN else f"prompts of {known}"
            print(
                f"asking {self.served_name} at {self.endpoint.base}, "
                f"{self.endpoint.concurrency} requests at once: {prompts}, "
                f"boxes in the frame {self.prompts.frame.name}",
                file=sys.stderr,
                flush=True,
            )
        counts: list[tuple[int | None, int | None]] = []  # of tokens
        failures: dict[int, Exception] = {}
        in_a_row, has_answered = 0, len(indices) < len(examples)
        turns = max((start.max_turns for _, start in begun if start is not None), default=1)
        limit = turns * (self.endpoint.retries + 1) * (self.endpoint.timeout + LONGEST_WAIT)

        def ask(index: int) -> Answer:
            return self._ask(task, begun[index], seeds[index])

        with closing(call_each(ask, indices, self.endpoint.concurrency, limit)) as results:
            for position, found in results:
                index = indices[position]
                if isinstance(found, ServiceError | TimeoutError):
                    failures[index] = found
                    in_a_row += not (has_answered and _is_refusal(found))
                    is_dead = getattr(found, "status", None) in _DEAD
                    enough = 2 if is_dead else FAILURES_IN_A_ROW
                    if in_a_row >= max(enough, self.endpoint.concurrency):
                        break
                elif isinstance(found, BaseException):
                    raise found
                else:
                    in_a_row, has_answered = 0, True
                    if len(found.completion.turns) < 2:
                        self._check_length(found, task, examples[index])
                    counts.append((found.prompt_tokens, found.completion_tokens))
                    yield range(index, index + 1), [found.completion]
        if counts and is_several:
            tokens = "no numbers of tokens, which the server does not report"
            if not any(None in pair for pair in counts):
                prompt, completion = (sum(filter(None, own)) for own in zip(*counts, strict=True))
                tokens = f"{prompt:,} prompt and {completion:,} completion tokens"
            print(f"{len(counts)} answers: {tokens}", file=sys.stderr, flush=True)
        if failures:
            raise UserError(_describe_failures(failures, examples, len(indices) - len(counts)))

    def _ask(self, task: Task, begun: Begun, seed: Seed) -> Answer:
        example, start = begun
        messages = build_messages(self.prompts.write(example, task), self._load_media(example))
        if start is None:
            return self._ask_turn(messages, self._options, seed)
        # An episode: each text is asked for behind those before it and what was read after them.
        tags = task.resolve(example)[1].environment.call_tags
        options = {**self._options, "stop": [*self._options.get("stop", ()), tags[1]]}
        if isinstance(self.prompts, PromptBuilder):
            options |= _KEEP_STOP
        answers, turns, state = list[Answer](), list[EpisodeTurn](), start.state
        while True:
            try:
                answer = self._ask_turn(messages, options, (*seed, *filter(None, [len(turns)])))
            except ServiceError as error:
                if not (turns and _is_refusal(error)):
                    raise
                break  # what was read is too long for the server
            answers.append(answer)
            text, stop, call, observed = answer.completion.text, answer.completion.stop, None, None
            if tags[0] and tags[0] in text.rpartition(tags[1])[2] and stop != "length":
                text += tags[1]  # which servers leave out
            if tags[1] in text:
                ((state, call, observed),) = self.runner.step([state], [text])
            turns.append(EpisodeTurn(text, call, observed))
            options["max_tokens"] -= answer.completion_tokens or 0
            if observed is None or len(turns) >= start.max_turns or options["max_tokens"] <= 0:
                break
            shown = Example("observation", observed.images, "", None)
            media = self._load_media(self.prompts.with_resized_sizes(shown))
            chat = Turn("assistant", text), self.prompts.write_result(observed)
            messages = [*messages, *build_messages(chat, media)]
        columns = zip(*((a.prompt_tokens, a.completion_tokens) for a in answers), strict=True)
        counts = (None if None in column else sum(filter(None, column)) for column in columns)
        stop = answers[-1].completion.stop
        return Answer(Completion.from_text(turns[-1].text, stop, turns), *counts)

    def _ask_turn(self, messages: list[Any], given: Mapping[str, Any], seed: Seed) -> Answer:
        options = dict(given)
        if options["temperature"]:
            digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
            options["seed"] = int.from_bytes(digest, "little") >> 1  # 31 bits, as all servers take
        answer = self.client.ask(messages, options, self.prompts.thinking_tags)
        text = self.prompts.remove_control_tokens(answer.completion.text)
        return replace(answer, completion=replace(answer.completion, text=text))

    def _load_media(self, example: Example) -> list[Image.Image | str]:
        images = (image for image, _ in self.prompts.load_images(example))
        media = example.images
        try:
            return [encode_clip(m) if isinstance(m, VideoRef) else next(images) for m in media]
        except ValueError as error:
            raise UserError(f"{example.name}: {error}") from error

    def _build_options(self) -> dict[str, Any]:
        # A policy in this process samples by the same settings.
        rollout = self.settings.rollout
        options: dict[str, Any] = {
            "temperature": self.settings.evaluation.temperature,
            "max_tokens": rollout.max_completion_length,
        }
        if rollout.stop:
            options["stop"] = list(rollout.stop)
        if rollout.min_new_tokens:
            options["min_tokens"] = rollout.min_new_tokens
        prompt, arguments = self.settings.prompt, dict(self.settings.prompt.chat_template_kwargs)
        if isinstance(self.prompts, PromptBuilder):
            arguments = self.prompts.chat.arguments
        elif prompt.thinking is not None:  # a template ignores the name that it does not have
            arguments |= dict.fromkeys(THINKING_SWITCHES, prompt.thinking)
        if arguments:
            options["chat_template_kwargs"] = arguments
        if isinstance(self.prompts, PromptBuilder):  # box markers are special tokens
            stop = _KEEP_STOP if rollout.stop else {}
            options |= {**_NEUTRAL, "skip_special_tokens": False, **stop}
        return options

    def _check_length(self, answer: Answer, task: Task, example: Example) -> None:
        """Warn if the server counts other tokens in a prompt than the model's processor."""
        prompts, counted = self.prompts, answer.prompt_tokens
        if not (self._unchecked and isinstance(prompts, PromptBuilder) and counted):
            return
        self._unchecked -= 1
        expected = len(prompts.build(example, task).token_ids)
        if counted != expected:
            self._unchecked = 0
            logger.warning(
                "the server counts %d tokens in the prompt of %s, and the processor of %s %d: its "
                "model, chat template, pixel budget or choice of a clip's frames differs, so its "
                "outputs may, too",
                *(counted, example.name, self.settings.model, expected),
            )


def _load_prompts(endpoint: Endpoint, settings: Settings) -> PromptWriter:
    if settings.model != UNKNOWN:
        if endpoint.frame is not None:
            raise UserError(
                f"--frame needs model={UNKNOWN}: the frame of {settings.model} is known"
            )
        return load_prompt_builder(settings)
    least, most = settings.policy.min_pixels, settings.policy.max_pixels
    budget = None if not (least or most) else PixelBudget(least or 1, most or sys.maxsize)
    prompts = PromptWriter(endpoint.frame or ORIGINAL, budget, settings.prompt)
    prompts.takes_videos = True  # or the server refuses them
    return prompts


def _is_refusal(failure: Exception) -> bool:
    return isinstance(failure, ServiceError) and failure.status in _REFUSED


def _describe_failures(
    failures: Mapping[int, Exception], examples: Sequence[Example], missing: int
) -> str:
    """Return the message for ``missing`` examples without an output, with the failures by index."""
    lines = (f"{examples[index].name}: {failure}" for index, failure in sorted(failures.items()))
    count = f"{missing} examples" if missing > 1 else "1 example"
    stopped = f"; after {len(failures)} failures it was asked no more"
    text = f"the server gave no output for {count}{stopped if missing > len(failures) else ''}:\n"
    text += list_bad_rows(lines, 10)
    if any(map(_is_refusal, failures.values())):
        text += (
            "\nif a prompt is too long for the server, lower policy.max_pixels or "
            "rollout.max_completion_length, or give the server a longer context"
        )
    if len(examples) > 1:
        text += "\nall other outputs are saved: the same command asks for these"
    return text


EvaluatedModel = LocalModel | RemoteModel
"""A model that is evaluated.

``split`` splits the indices of examples, each ``evaluation.samples`` times, one after the other,
into chunks. ``generate`` yields those of ``todo`` in any order, with a completion of each index.
``runner`` calls tools. The examples have begun (``begin_episodes``); the seeds of one share a
prefix. An example
without an output is a ``UserError`` after all others. ``served_name`` is None of a policy.
"""


def load_evaluated_model(
    settings: Settings, weights: Path | None = None, server: Endpoint | str | None = None
) -> EvaluatedModel:
    """Load a policy for evaluation on this process's device, or connect to a server.

    Without ``weights``, the folder of a checkpoint, they are those of ``settings.model``.
    """
    disable_progress_bar()
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
    model: EvaluatedModel,
    task: Task,
    examples: Sequence[Example],
    log: PredictionLog | None = None,
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
