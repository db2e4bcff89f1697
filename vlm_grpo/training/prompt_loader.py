"""Prompts in training order, prepared ahead of time."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from vlm_grpo.data.prompt_order import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.model.episodes import begin_episodes
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.training.methods import Variant
from vlm_grpo.types import Example, Prompt

logger = logging.getLogger(__name__)

MAX_REPLACEMENTS = 8
"""Number of later examples to try in place of one that cannot be read."""


class PromptLoader:
    """A loader of prompts in the stream's order, which prepares the next step's in advance.

    Reading, resizing and splitting an image into patches needs no model, so a thread does it ahead
    of time, or several do; image decoders and tensor operations release the interpreter's lock.
    With ``skip_unreadable``, an example that cannot be read is replaced by a later one. ``runner``
    begins the episodes of prompts with an environment. The policy's ``counters`` count the work.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        stream: ExampleStream,
        skip_unreadable: bool,
        threads: int = 1,
        runner: EnvironmentRunner | None = None,
    ) -> None:
        self.runner = runner
        self.policy, self.task, self.stream = policy, task, stream
        self.skip_unreadable = skip_unreadable
        self._pending: dict[tuple[int, Variant | None], Future[tuple[Prompt, bool]]] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompts")

    def load(self, indices: Sequence[int], variant: Variant | None = None) -> list[Prompt]:
        """Return the prompts at these indices of the stream, with their other forms."""
        self._submit(indices, variant)
        prompts, counters = list[Prompt](), self.policy.counters
        for index in indices:
            prompt, is_replacement = self._pending.pop((index, variant)).result()
            for part in (prompt, prompt.variant):
                counters.image_decodes += 0 if part is None else part.image_decodes
            counters.replaced_prompts += is_replacement
            prompts.append(prompt)
        return prompts

    def prefetch(self, indices: Sequence[int], variant: Variant | None = None) -> None:
        """Start loading the prompts of the next ``load``, and drop all others."""
        for key in self._pending.keys() - {(index, variant) for index in indices}:
            self._pending.pop(key).cancel()
        self._submit(indices, variant)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, indices: Sequence[int], variant: Variant | None) -> None:
        for key in ((index, variant) for index in indices):
            if key not in self._pending:
                self._pending[key] = self._threads.submit(self._load, *key)

    def _load(self, index: int, variant: Variant | None) -> tuple[Prompt, bool]:
        """Load the prompt at an index, or the first readable one after it; return whether it is a
        later one."""
        position = index
        while True:
            try:
                builder, own = self.policy.prompts, self.stream[position]
                example, start = begin_episodes(builder, self.runner, own, self.task)
                prompt = replace(self._build(example), start=start)
                if variant is not None and start is None:
                    prompt = replace(prompt, variant=self._vary(example, index, variant))
            except UserError as error:
                if not self.skip_unreadable or position == index + MAX_REPLACEMENTS:
                    raise
                logger.warning("%s; using the next example instead", error)
                position += 1
            else:
                return prompt, position > index

    def _vary(self, example: Example, index: int, variant: Variant) -> Prompt | None:
        try:
            if (other := variant.change(example, index)) is None:
                return None
            other = self.policy.prompts.with_resized_sizes(other)
        except ValueError as error:
            raise UserError(f"{example.name}: {variant.label[0]}: {error}") from error
        return replace(self._build(other), label=variant.label)

    def _build(self, example: Example) -> Prompt:
        prompt = self.policy.prompts.build(example, self.task)
        if self.policy.device.type != "cuda":
            return prompt
        pairs = prompt.vision.items()  # only copies from pinned memory do not wait
        pinned = {n: v.pin_memory() if isinstance(v, Tensor) else v for n, v in pairs}
        return replace(prompt, vision=pinned)
