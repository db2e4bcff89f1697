"""Prompts in training order, prepared ahead of time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task import Task
from vlm_grpo.training.methods import Variant
from vlm_grpo.types import Example, Prompt
from vlm_grpo.utils.chat import Turn
from vlm_grpo.utils.worker_pool import WorkerEnded, WorkerError, WorkerPool

logger = logging.getLogger(__name__)

MAX_REPLACEMENTS = 8
"""Number of later examples to try in place of one that cannot be read."""


class PromptLoader:
    """A loader of prompts in the stream's order, which prepares the next step's in advance.

    Reading, resizing and splitting an image into patches needs no model, so a thread does it ahead
    of time; image decoders and tensor operations release the interpreter's lock. With ``workers``
    processes, one thread per worker writes the questions and waits for the worker to prepare the
    images; the prompts are the same. With ``skip_unreadable``, an example that cannot be read is
    replaced by a later one. The policy's ``counters`` count the work.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        stream: ExampleStream,
        skip_unreadable: bool,
        workers: int = 0,
    ) -> None:
        self.policy, self.task, self.stream = policy, task, stream
        self.skip_unreadable = skip_unreadable
        self._pending: dict[tuple[int, Variant | None], Future[tuple[Prompt, bool]]] = {}
        self._threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="prompts")
        self._pool: WorkerPool | None = None
        if workers:
            names = "prompt", "data.dataloader_num_workers"
            self._pool = WorkerPool(workers, names, _Worker.start, [policy.prompts])

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
        if self._pool is not None:
            self._pool.close()

    def _submit(self, indices: Sequence[int], variant: Variant | None) -> None:
        for key in ((index, variant) for index in indices):
            if key not in self._pending:
                self._pending[key] = self._threads.submit(self._load, *key)

    def _load(self, index: int, variant: Variant | None) -> tuple[Prompt, bool]:
        """Load the prompt at an index, or the first readable one after it, and say whether it is
        one after it."""
        position = index
        while True:
            try:
                example = self.policy.prompts.with_resized_sizes(self.stream[position])
                prompt = self._build(example)
                other = None if variant is None else variant.change(example, index)
                if variant is not None and other is not None:
                    changed = replace(self._build(other), label=variant.label)
                    prompt = replace(prompt, variant=changed)
            except UserError as error:
                is_last = position == index + MAX_REPLACEMENTS
                if not self.skip_unreadable or is_last or isinstance(error, WorkerError):
                    raise
                logger.warning("%s; using the next example instead", error)
                position += 1
            else:
                return prompt, position > index

    def _build(self, example: Example) -> Prompt:
        if self._pool is None:
            prompt = self.policy.prompts.build(example, self.task)
        else:
            prompt = self._build_in_worker(self._pool, example)
        if self.policy.device.type != "cuda":
            return prompt
        pairs = prompt.vision.items()  # only copies from pinned memory do not wait
        pinned = {n: v.pin_memory() if isinstance(v, Tensor) else v for n, v in pairs}
        return replace(prompt, vision=pinned)

    def _build_in_worker(self, pool: WorkerPool, example: Example) -> Prompt:
        """Build a prompt in a worker, or in a second one if the first ends."""
        turns = self.policy.prompts.write(example, self.task)
        sent = replace(example, answer=None, meta={})  # the worker does not need them
        reason = None
        for _ in range(2):
            try:
                prompt = pool.schedule(_Worker.encode, (sent, turns)).result()
            except WorkerEnded as error:
                reason = error
                logger.warning("%s: the worker of its prompt ended (%s)", example.name, reason)
            else:
                pairs = prompt.vision.items()
                vision = {
                    n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in pairs
                }
                return replace(prompt, example=example, vision=vision)
        raise WorkerError(
            f"{example.name}: two workers ended while they prepared its prompt ({reason}), perhaps "
            "for lack of memory: lower data.dataloader_num_workers; 0 prepares prompts in the "
            "training process"
        )


class _Worker:
    """A worker process."""

    builder: ClassVar[PromptBuilder]

    @classmethod
    def start(cls, builder: PromptBuilder) -> None:
        cls.builder = builder
        torch.set_num_threads(1)

    @classmethod
    def encode(cls, example: Example, turns: Sequence[Turn]) -> Prompt:
        """Build a prompt, with arrays, which are pickled faster than tensors."""
        prompt = cls.builder.encode(example, turns)
        pairs = prompt.vision.items()
        arrays = {n: v.numpy() if isinstance(v, Tensor) else v for n, v in pairs}
        return replace(prompt, vision=arrays)
