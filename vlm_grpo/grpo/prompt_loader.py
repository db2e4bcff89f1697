"""Prompts in training order, prepared ahead of time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.types import Prompt

logger = logging.getLogger(__name__)

MAX_REPLACEMENTS = 8
"""Number of later examples to try in place of one that cannot be read."""


@dataclass(frozen=True)
class _Loaded:
    """A prompt; ``is_replacement`` if it replaces one that could not be read."""

    prompt: Prompt
    is_replacement: bool


class PromptLoader:
    """A loader of prompts in the stream's order, which prepares the next step's in advance.

    Reading, resizing and splitting an image into patches needs no model, so a thread does it ahead
    of time; image decoders and tensor operations release the interpreter's lock.

    Args:
        policy: turns examples into prompts, and counts the work in its ``counters``.
        task: writes the questions.
        stream: the examples.
        skip_unreadable: replace an example that cannot be read by a later one; otherwise it is an
            error.
    """

    def __init__(
        self, policy: Policy, task: Task, stream: ExampleStream, skip_unreadable: bool
    ) -> None:
        self.policy, self.task, self.stream = policy, task, stream
        self.skip_unreadable = skip_unreadable
        self._pending: dict[int, Future[_Loaded]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    def load(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these indices of the stream.

        Raises:
            UserError: an example cannot be read.
        """
        self._submit(indices)
        loaded = [self._pending.pop(index).result() for index in indices]
        counters = self.policy.counters
        counters.image_decodes += sum(item.prompt.image_decodes for item in loaded)
        counters.replaced_prompts += sum(item.is_replacement for item in loaded)
        return [item.prompt for item in loaded]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start loading the prompts of the next ``load``, and drop all others."""
        for index in self._pending.keys() - set(indices):
            self._pending.pop(index).cancel()
        self._submit(indices)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self._pending:
                self._pending[index] = self._thread.submit(self._load, index)

    def _load(self, index: int) -> _Loaded:
        """Load the prompt at an index, or the first readable one after it."""
        position = index
        while True:
            try:
                example = self.policy.with_resized_sizes(self.stream[position])
                prompt = self.policy.build_prompt(example, self.task)
            except UserError as error:
                if not self.skip_unreadable or position == index + MAX_REPLACEMENTS:
                    raise
                logger.warning("%s; using the next example instead", error)
                position += 1
            else:
                return _Loaded(prompt, position > index)
