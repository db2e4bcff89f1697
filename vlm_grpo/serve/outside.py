"""The interface of a sampler outside this process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.types import Completion, Prompt


class OutsideSampler(Protocol):
    """A sampler with weights of its own, which generates in the background.

    What is started runs in that order, one after another.

    Attributes:
        ready: is finished when it can be given weights; raises ``UserError`` if that will not be.
    """

    ready: Future[None]

    def publish(self, version: int) -> None:
        """Give what is started from now on the policy's weights of now.

        All ranks call it between two steps, in their main thread.

        Args:
            version: number of finished steps.

        Raises:
            UserError: on all ranks, if a server does not get ready or the weights cannot be sent.
        """
        ...

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        num_generations: Sequence[range],
        seeds: Sequence[Sequence[int | str]],
    ) -> Future[list[tuple[Completion, ...]]]:
        """Start sampling completions of this rank's prompts; arguments as in ``Policy.sample``.

        Returns:
            The completions of each prompt, with the ``version`` of the weights that sampled them.
            The future raises ``UserError`` if they cannot be sampled: all servers have failed, or
            one reads a prompt otherwise.
        """
        ...

    def rest(self) -> None:
        """Free memory that the update needs, until the next ``publish``.

        All ranks call it when all that was started is finished and no other rollout of the step
        will be started.
        """
        ...

    def close(self) -> None:
        """Drop what has not finished, and end what this sampler has started."""
        ...
