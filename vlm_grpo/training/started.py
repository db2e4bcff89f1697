"""A round of sampling that has begun, perhaps in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

from vlm_grpo.types import Completion, Prompt
from vlm_grpo.utils.timing import StopRequest

POLL_SECONDS = 0.1
"""Time between two looks at the request to stop."""

Completions = list[tuple[Completion, ...]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class StartedRound:
    """The prompts of a round of sampling, with the completions that an outside sampler generates.

    Attributes:
        indices: the stream's indices that all ranks sample.
        own: those that this rank samples.
        prompts: the prompts of ``own``.
        completions: their completions, once they are there; None: the policy samples them.
        began: time at which the round began.
        ended: time at which the completions were there, once they are.
    """

    indices: Sequence[int]
    own: list[int]
    prompts: list[Prompt]
    completions: Future[Completions] | None = None
    began: float = field(default_factory=time.perf_counter)
    ended: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.completions is not None:
            self.completions.add_done_callback(lambda _: self.ended.append(time.perf_counter()))


def wait_for(future: Future[Result], stop_request: StopRequest) -> Result:
    """Wait for the result of a future.

    Raises:
        UserError: it has failed.
        StepInterrupted: a stop was requested before the result was there.
    """
    while not wait([future], POLL_SECONDS).done:
        stop_request.check()
    return future.result()
