"""Optional methods: each is one file in this folder, which the registry finds.

A method scores completions in passes of its own, and gives factors of tokens and terms of the loss.
The rest of the training code names no method's file.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from vlm_grpo.config.objective import ObjectiveSettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.model.engine.batch import GroupSlice
    from vlm_grpo.model.policy import Policy
    from vlm_grpo.training.batch import Rollout
    from vlm_grpo.training.objective.batch import TokenBatch
    from vlm_grpo.training.objective.losses import LossInputs, Shares
    from vlm_grpo.types import Group

Scores = Mapping[str, Mapping[int, Tensor]]
"""(T,) values of the tokens of each completion, by name and completion."""


class Scorer(Protocol):
    """The passes that the updater can make without gradient."""

    policy: Policy

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per pass."""
        ...

    def policy_logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Return the (T,) log-probs under the policy by completion, on all ranks at once."""
        ...

    def reference_logprobs(self, slices: Sequence[GroupSlice]) -> dict[int, Tensor]:
        """Return the (T,) log-probs under the reference policy by completion."""
        ...


class ScoredStep:
    """The completions of a step while the methods score them.

    Args:
        rollout: this rank's groups.
        slices: their completions, by group.
        scorer: makes the passes.

    Attributes:
        penalties: (T,) penalties of the tokens of each completion, to subtract from the rewards;
            None: there are none.
    """

    def __init__(self, rollout: Rollout, slices: Sequence[GroupSlice], scorer: Scorer) -> None:
        self.rollout, self.slices, self.scorer = rollout, slices, scorer
        self.penalties: Sequence[Tensor] | None = None

    @cached_property
    def old_logprobs(self) -> dict[int, Tensor]:
        """(T,) log-probs under the policy by completion, which the update then need not score."""
        return self.scorer.policy_logprobs(self.slices)

    @property
    def known_logprobs(self) -> dict[int, Tensor]:
        """``old_logprobs`` if a method has asked for them; otherwise empty."""
        return vars(self).get("old_logprobs", {})


class Method:
    """An optional method of a run; each hook does nothing unless a method overrides it.

    Args:
        settings: the run's settings, which use the method.
        policy: the policy that is trained.

    Attributes:
        name: the name of its term in the loss.
        phase: the phase of its passes in the metrics of time.
    """

    name: ClassVar[str]
    phase: ClassVar[str]

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self.settings = settings

    @classmethod
    def is_used(cls, objective: ObjectiveSettings) -> bool:
        """Return whether the settings use the method."""
        raise NotImplementedError

    def score(self, step: ScoredStep) -> Scores:
        """Score the step's completions in further passes; all ranks call it together.

        Scores reach the loss as ``TokenBatch.scores``, or as its field of that name.
        """
        return {}

    def weigh_tokens(self, rollout: Rollout, scores: Scores) -> Mapping[int, Tensor] | None:
        """Return (T,) factors of the tokens' policy losses by completion; None: all are 1.

        All ranks call it together; ``scores`` has those of all methods.
        """
        return None

    @classmethod
    def add_weights(
        cls, weights: dict[str, Tensor], shares: Shares, objective: ObjectiveSettings
    ) -> None:
        """Add the weight of each completion's tokens in the method's term, or change the others."""

    @classmethod
    def covers(cls, group: Group) -> bool:
        """Return whether the method's term includes the group's completions."""
        return True

    @classmethod
    def term(cls, inputs: LossInputs) -> Tensor:
        """Compute the value of each token, (M,), in the method's term of the loss."""
        raise NotImplementedError

    @classmethod
    def metrics(cls, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        """Return values of the tokens, (M,), whose means over the active tokens are metrics."""
        return {}


@functools.cache
def find_methods() -> Mapping[str, type[Method]]:
    """Return the methods in this folder by name, in the order of their names."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
    ]
    return {method.name: method for method in sorted(found, key=lambda method: method.name)}


def load_methods(settings: Settings, policy: Policy) -> tuple[Method, ...]:
    """Load the methods that the settings use; raises UserError if one cannot be used."""
    used = [method for method in find_methods().values() if method.is_used(settings.objective)]
    return tuple(method(settings, policy) for method in used)
