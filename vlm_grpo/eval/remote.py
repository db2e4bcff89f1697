"""Outputs of a model behind an address: one request per example, several at once."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

from PIL import Image

from vlm_grpo.config.prompt import THINKING_SWITCHES
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.model.families import PixelBudget
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter, load_prompt_builder
from vlm_grpo.model.resolve import UNKNOWN
from vlm_grpo.serve.chat import Answer, ChatClient, Endpoint, build_messages, encode_clip
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import ORIGINAL
from vlm_grpo.types import Completion, Example, VideoRef
from vlm_grpo.utils.http_json import LONGEST_WAIT, ServiceError
from vlm_grpo.utils.remote_calls import call_each

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 8
"""Number of failed examples, without an answer between them, after which no more are asked; at
least as many as are asked at once."""
_CHECKED_PROMPTS = 16
"""Number of prompts whose length is compared with the server's count."""
_REFUSED = (400, 413, 422)
"""Status codes with which servers refuse one prompt, such as one that is too long."""
_KEEP_STOP = {"include_stop_str_in_output": True, "no_stop_trim": True}
"""Fields of vLLM and SGLang that leave a stop string in the text, as a policy does."""
_NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Fields that undo the model's own generation defaults, which servers of weights apply."""

Seed = tuple[int | str, ...]
"""The parts of the seed of an example's random numbers."""


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
        self.prompts = _load_prompts(endpoint, settings)
        self.client = ChatClient(endpoint)
        self.served_name = self.client.model
        self._options = self._build_options()
        self._unchecked = _CHECKED_PROMPTS

    def split(self, examples: Sequence[Example]) -> list[range]:
        # An output does not depend on the other examples.
        return [range(index, index + 1) for index in range(len(examples))]

    def generate(
        self, task: Task, examples: Sequence[Example], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        indices = [index for chunk in todo for index in chunk]
        usage = _Usage(self, len(indices))
        failures: dict[int, Exception] = {}
        in_a_row, has_answered = 0, len(indices) < len(examples)
        limit = (self.endpoint.retries + 1) * (self.endpoint.timeout + LONGEST_WAIT)

        def ask(index: int) -> Answer:
            return self._ask(task, examples[index], seeds[index])

        with closing(call_each(ask, indices, self.endpoint.concurrency, limit)) as results:
            for position, found in results:
                index = indices[position]
                if isinstance(found, ServiceError | TimeoutError):
                    failures[index] = found
                    in_a_row += not (has_answered and _is_refusal(found))
                    if in_a_row == max(FAILURES_IN_A_ROW, self.endpoint.concurrency):
                        break
                elif isinstance(found, BaseException):
                    raise found
                else:
                    in_a_row, has_answered = 0, True
                    self._check_length(found, task, examples[index])
                    usage.add(found)
                    yield range(index, index + 1), [found.completion]
        usage.finish()
        if failures:
            missing = len(indices) - usage.answers
            raise UserError(_describe_failures(failures, examples, missing))

    def _ask(self, task: Task, example: Example, seed: Seed) -> Answer:
        messages = build_messages(self.prompts.write(example, task), self._load_media(example))
        options = dict(self._options)
        if options["temperature"]:
            digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
            options["seed"] = int.from_bytes(digest, "little") >> 1  # 31 bits, as all servers take
        answer = self.client.ask(messages, options, self.prompts.thinking_tags)
        if not isinstance(self.prompts, PromptBuilder):
            return answer
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


class _Usage:
    """The tokens and time of the answers so far, with an estimate after the first ones."""

    def __init__(self, model: RemoteModel, total: int) -> None:
        self.endpoint, self.total = model.endpoint, total
        self.answers = self.prompt_tokens = self.completion_tokens = 0
        self.seconds, self.is_counted = 0.0, True
        self.due = min(2 * self.endpoint.concurrency, max(1, total // 10))
        known = model.settings.model
        prompts = "images in their own size" if known == UNKNOWN else f"prompts of {known}"
        self._print(
            f"asking {model.served_name} at {self.endpoint.base}, "
            f"{self.endpoint.concurrency} requests at once: {prompts}, "
            f"boxes in the frame {model.prompts.frame.name}"
        )

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.seconds += answer.seconds
        if answer.prompt_tokens is None or answer.completion_tokens is None:
            self.is_counted = False
        else:
            self.prompt_tokens += answer.prompt_tokens
            self.completion_tokens += answer.completion_tokens
        if self.answers == self.due:
            left = self.total - self.answers
            at_once = max(1, min(left, self.endpoint.concurrency))
            seconds = self.seconds / self.answers * left / at_once
            usage = self._describe(1 / self.answers, self.total / self.answers)
            self._print(
                f"estimate from {self.answers} of {self.total} examples: {usage}, "
                f"about {timedelta(seconds=round(seconds))} left"
            )

    def finish(self) -> None:
        if self.answers:
            self._print(f"{self.answers} answers: {self._describe()}")

    def _describe(self, token_scale: float = 1, price_scale: float = 1) -> str:
        if not self.is_counted:
            return "no numbers of tokens, which the server does not report"
        prompt, completion = self.prompt_tokens, self.completion_tokens
        text = f"{prompt * token_scale:,.0f} prompt and {completion * token_scale:,.0f} completion"
        text += " tokens per example" if token_scale < 1 else " tokens"
        if self.endpoint.price is None:
            return text
        price, completion_price = self.endpoint.price
        cost = (prompt * price + completion * completion_price) / 1e6 * price_scale
        return f"{text}, a cost of {cost:.4g} in total"

    def _print(self, line: str) -> None:
        if self.total > 1:
            print(line, file=sys.stderr, flush=True)


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
    reasons: dict[str, list[int]] = {}
    for index, failure in sorted(failures.items()):
        reasons.setdefault(str(failure), []).append(index)
    lines = []
    for reason, indices in reasons.items():
        others = f" and {len(indices) - 1} others" if len(indices) > 1 else ""
        lines.append(f"{examples[indices[0]].name}{others}: {reason}")
    count = f"{missing} examples" if missing > 1 else "1 example"
    stopped = f"; after {len(failures)} failures it was asked no more"
    text = f"the server gave no output for {count}{stopped if missing > len(failures) else ''}:\n"
    text += bullets(lines, 10)
    if any(map(_is_refusal, failures.values())):
        text += (
            "\nif a prompt is too long for the server, lower policy.max_pixels or "
            "rollout.max_completion_length, or give the server a longer context"
        )
    if len(examples) > 1:
        text += "\nall other outputs are saved: the same command asks for these"
    return text
