"""Outputs of a model behind an address: one request per output, several at once."""

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from PIL import Image

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.eval.scored import Scored
from vlm_grpo.model.episodes import Begun
from vlm_grpo.model.families.family import PixelBudget
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter
from vlm_grpo.model.resolve import UNKNOWN
from vlm_grpo.serve.chat_client import Answer, ChatClient, Endpoint, build_messages, encode_clip
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import ORIGINAL
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.types import Completion, EpisodeTurn, Example, VideoRef
from vlm_grpo.utils.chat import THINKING_SWITCHES, Turn
from vlm_grpo.utils.http_json import LONGEST_WAIT, ServiceError
from vlm_grpo.utils.parallel_calls import call_each

logger = logging.getLogger(__name__)

# Failed examples, without an answer between them, after which no more are asked; at least as many
# as are asked at once. Those that a server is too dead to answer, by ``_DEAD``, suffice in pairs.
FAILURES_IN_A_ROW = 8
_DEAD = (None, 502, 503, 504)  # no response, or that of a proxy
_MAX_DIFFERENT = 20  # outputs that are printed
_CHECKED_PROMPTS = 16  # whose length is compared with the server's count
_REFUSED = (400, 413, 422)  # status codes with which servers refuse one prompt, such as a long one
# Fields of vLLM and SGLang that leave a stop string in the text, as a policy does.
_KEEP_STOP = {"include_stop_str_in_output": True, "no_stop_trim": True}
# Fields that undo the model's own generation defaults, which servers of weights apply.
_NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}

Seed = tuple[int | str, ...]  # the parts of the seed of an example's random numbers


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


def describe_differences(local: Scored, served: Scored) -> str:
    """Return how many outputs of a server differ from a policy's of the same examples, how many of
    them have another reward or metric, and the first ones, around the first difference."""
    lines, rescored = list[str](), 0
    for row, other in zip(local.rows, served.rows, strict=True):
        pair = row, other
        texts = ["".join(t.text for t in r.get("turns", ())) or r["output"] for r in pair]
        if texts[0] != texts[1]:
            here, there = ({**r["rewards"], **r["metrics"]} for r in pair)
            rescored += here != there
            letters = enumerate(zip(*texts, strict=False))
            same = next((i for i, (a, b) in letters if a != b), min(map(len, texts)))
            title = f"  {row['id']}: equal up to character {same}"
            title += ", another score" * (here != there)
            here, there = (repr(text[max(0, same - 30) : same + 50]) for text in texts)
            lines.append(f"{title}\n    here    {here}\n    server  {there}")
    share = f"{len(lines)} of {local.n} outputs differ ({len(lines) / local.n:.1%})"
    return "\n".join([f"{share}, {rescored} with another score", *lines[:_MAX_DIFFERENT]])
