"""Optional methods: each is one file in this folder, or a file of the user's.

A method of this folder has a block of settings, or its settings in its file; ``methods`` then has
its name, as it has the path of a user's file.

A method asks for passes and gives terms: it may write or choose the prompts and groups of a step,
sample behind other forms of a prompt, score completions in passes of its own, weigh tokens and add
terms to the loss. The rest of the training code names no method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from vlm_grpo.config.combinations import get
from vlm_grpo.config.methods import (
    OwnMethod,
    find_classes,
    load_built_in,
    load_method_file,
    read_own_settings,
)
from vlm_grpo.errors import UserError
from vlm_grpo.training.objective.kl import image_dependency
from vlm_grpo.training.step_batch import score_slices

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlm_grpo.config.objective import ObjectiveSettings
    from vlm_grpo.config.run import Settings
    from vlm_grpo.data.prompt_order import ExampleStream
    from vlm_grpo.dist.strategy import Strategy
    from vlm_grpo.model.engine.logprobs import TokenScores
    from vlm_grpo.model.engine.packing import GroupSlice
    from vlm_grpo.model.families.family import ImageFeatures, Unit
    from vlm_grpo.model.policy import Policy
    from vlm_grpo.task import Task
    from vlm_grpo.training.objective.losses import LossInputs, Shares
    from vlm_grpo.training.objective.token_batch import TokenBatch
    from vlm_grpo.training.step_batch import KeptGroup, Rollout, StepAdvantages, Values
    from vlm_grpo.types import Example, Group, Observed, Prompt

Metrics = dict[str, float]
"""Metrics of a step: values by name."""
Groups = Mapping[int, "Group"]
"""This rank's groups in a step, by their index in the stream."""


@dataclass(frozen=True)
class Run:
    """The run that methods are part of."""

    settings: Settings
    strategy: Strategy  # the policy, its optimizer and the ranks
    stream: ExampleStream
    task: Task

    @property
    def policy(self) -> Policy:
        return self.strategy.policy


class Variant:
    """Another form of a step's prompts, from behind which a part of each group is sampled.

    Equal variants have equal hashes: prompts are prepared ahead of time and found by them.
    """

    label: ClassVar[tuple[str, int]]
    """The name and strength of the change, which mark the completions."""

    def change(self, example: Example, index: int) -> Example | None:
        """Return the other form of the example at an index of the stream; None: it has none."""
        raise NotImplementedError


@dataclass
class Passes:
    """The completions of a step, and the passes without gradient that score them."""

    rollout: Rollout
    slices: Sequence[GroupSlice]  # this rank's completions by group
    strategy: Strategy
    max_tokens: int  # number of tokens to score at once

    def behind(self, change: Callable[[Group], Example | None]) -> list[GroupSlice]:
        """Return the sampled groups whose example has another form, behind that one."""
        changed: list[GroupSlice] = []
        prompts = self.strategy.policy.prompts
        own = self.slices[: len(self.rollout.groups)]  # those of recalled groups are last
        for group, piece in zip(self.rollout.groups, own, strict=True):
            if (seen := change(group)) is not None:
                try:
                    seen = prompts.with_resized_sizes(seen)
                except ValueError as error:
                    raise UserError(f"{seen.name}: its changed image: {error}") from error
                changed.append(replace(piece, prompt=prompts.encode_text(seen, piece.prompt.text)))
        return changed

    def score(
        self,
        slices: Sequence[GroupSlice] | None = None,
        others: Tensor | None = None,
        weights: AbstractContextManager[None] | None = None,
        model: Policy | None = None,
        top_k: int = 0,
    ) -> TokenScores:
        """Return scores of the step's tokens. All ranks must call it.

        Args:
            slices: the completions to score, perhaps behind other prompts; None: all.
            others: (T,) log-probs of the other completions; None: 0.
            weights: puts other weights into the policy; None: it has the current ones.
            model: another model that scores; None: the policy.
            top_k: number of the likeliest tokens in each place to score, too.
        """
        slices = self.slices if slices is None else slices
        arguments = slices, self.rollout.layout, self.max_tokens, others, top_k
        if model is not None:
            return score_slices(model, *arguments)
        if weights is not None:
            self.strategy.release()
        with weights or nullcontext(), self.strategy.gathered():
            found = score_slices(self.strategy.policy, *arguments)
            if weights is not None:
                self.strategy.release()
        return found


class Method:
    """An optional method of a run; each hook does nothing unless a method overrides it.

    ``own`` are its settings; of a file's method, those of its class of settings.
    """

    name: ClassVar[str]  # the name of its term in the loss, and in files
    phase: ClassVar[str] = ""  # the phase of its passes in the metrics of time; empty: ``name``
    block: ClassVar[str] = ""  # key of its settings; empty: in its file
    # name of the file of its state in checkpoints; empty: ``method_NAME``
    state_name: ClassVar[str] = ""
    has_videos: ClassVar[bool] = True  # whether it supports examples with videos
    refused: ClassVar[tuple[str, ...]] = ()  # settings and methods that it does not work with
    run: Run
    snapshot: Any = None  # a ``Snapshot`` of the policy that it keeps
    is_alone: bool = False  # whether its term is the only one of the loss of its steps
    pool: int = 1  # number of candidates of ``choose`` per prompt

    def __init__(self, own: Any) -> None:
        self.own = own

    @classmethod
    def find(cls, settings: Settings | Mapping[str, Any]) -> Any:
        """Return the method's settings if a run's, or blocks of them by name, use it, else None;
        None of a method that ``methods`` names."""
        return get(settings, cls.block) if cls.block else None

    def start(self, run: Run) -> None:
        """Prepare for a run; raises ``UserError`` if the method cannot be used."""
        self.run, settings = run, run.settings
        for key in self.refused:
            if get(settings, key) if "." in key else key in settings.named_methods:
                raise UserError(f"methods: {self.name} does not work with {key}: remove one")

    # The prompts and groups of a step.

    def check_examples(
        self, policy: Policy, task: Task, settings: Settings
    ) -> Callable[[Example], object]:
        """Return a check of a training example, which raises ``UserError`` for a bad one."""
        return lambda example: None

    def writes(self, step: int) -> bool:
        """Return whether the method writes the completions of a step, which are not sampled."""
        return False

    def write(self, prompts: Sequence[Prompt], task: Task) -> list[Group]:
        """Write the completions of these prompts, which the method's term trains."""
        raise NotImplementedError

    def choose(self, position: int, count: int, /) -> Sequence[int]:
        """Return ``count`` of the stream's ``count * pool`` indices from ``position`` on."""
        return range(position, position + count)

    def variant(self, step: int) -> Variant | None:
        """Return another form of a step's prompts; None: there is none."""
        return None

    def count_variants(self, size: int) -> int:
        """Return how many of a group's completions are sampled behind the variant."""
        return 0

    def count_refused(self, size: int) -> int:
        """Return how many of a group's last episodes read a refusal in place of each result."""
        return 0

    def revise(self, group: Group) -> tuple[int, Observed] | None:
        """Return the number of one of a sampled group's completions and what is read behind it: the
        group is sampled anew as further turns of that one. None: the group stays.
        """
        return None

    def recall(self, count: int, step: int) -> list[KeptGroup]:
        """Return up to ``count`` groups of earlier steps, equal on all ranks, to train on once more
        in the places of groups without a gradient.
        """
        return []

    def observe(self, step: int, task: Task, groups: Groups) -> list[Any]:
        """Return what to learn from this rank's groups, by the stream's index; learn nothing yet.
        If one rank raises ``UserError``, no method learns from the step.
        """
        return []

    def learn(self, step: int, observed: list[Any], recalled: Sequence[KeptGroup]) -> Metrics:
        """Learn from what ``observe`` returned on all ranks; return metrics of the step."""
        return {}

    # Passes and values of tokens.

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        """Prepare a sampled step, before its passes."""

    def score(self, passes: Passes) -> Values:
        """Score the step's completions in further passes; all ranks call it together.

        Scores reach the loss as ``TokenBatch.scores``, or as its field of that name; ``penalties``
        are subtracted from the rewards, the update does not score ``old_logprobs`` again, and it
        scores ``candidates``, (T, k) tokens in the places of the completions' own, too.
        """
        return {}

    def weigh_tokens(self, rollout: Rollout, scores: Values) -> Tensor | None:
        """Return (T,) factors of the tokens' policy losses; None: all are 1.

        All ranks call it together; ``scores`` has those of all methods.
        """
        return None

    def credit(self, rollout: Rollout, advantages: StepAdvantages) -> StepAdvantages:
        """Return the advantages of this rank's completions, perhaps with others of their tokens."""
        return advantages

    # The loss.

    def add_weights(
        self, weights: dict[str, Tensor], shares: Shares, objective: ObjectiveSettings
    ) -> None:
        """Add the weight of each completion's tokens in the method's term, or change the others."""

    def covers(self, group: Group) -> bool:
        """Return whether the method's term includes the group's completions."""
        return True

    def term(self, inputs: LossInputs) -> Tensor:
        """Compute the value of each token, (M,), in the method's term of the loss."""
        raise NotImplementedError

    def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        """Return values of the tokens, (M,), whose means over the active tokens are metrics."""
        return {}

    # What a step shows.

    def read_features(self, updates: Sequence[Mapping[Unit, ImageFeatures]]) -> Metrics:
        """Return metrics of a sampled step, from the features of its images in each update: their
        ``grad`` is that of the loss, if a method has this hook. All ranks call it together.
        """
        return {}

    def draw(self, example: Example) -> Image | None:
        """Return a drawing over the target image of an example of the step, for the page."""
        return None

    # Resuming.

    @property
    def state_file(self) -> str:
        return self.state_name or f"method_{self.name}"

    def state_dict(self) -> tuple[Any, Mapping[str, Any]]:
        """Return the state in checkpoints: values that JSON can hold, and tensors by name."""
        return None, {} if self.snapshot is None else self.snapshot.state_dict()

    def load_state_dict(self, values: Any, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` returned; None and nothing if the run did not use it."""
        if self.snapshot is not None:
            self.snapshot.load_state_dict(tensors)


class ImageMethod(Method):
    """A method that raises the KL between the policy and itself when it sees less of the images.

    Its ``score`` returns, under ``name``, the log-probs of the policy that sees less.
    """

    has_videos = False

    def add_weights(self, weights: dict[str, Tensor], shares: Shares, objective: Any) -> None:
        if self.own.kl_coef:
            weights[self.name] = -self.own.kl_coef * shares.policy

    def covers(self, group: Group) -> bool:
        return bool(group.prompt.example.images)

    def term(self, inputs: LossInputs) -> Tensor:
        """Return the dependency of each token on the image (PAPO, arXiv:2507.06448, eq. 4).

        Only the policy that sees the whole image has a gradient, as in the authors' code."""
        return image_dependency(inputs.batch.logprobs, inputs.batch.scores[self.name])

    def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        found = batch.scores.get(self.name)  # None in warm-start steps
        return {} if found is None else {f"{self.name}/kl": image_dependency(batch.logprobs, found)}


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method has a hook of its own."""
    return getattr(type(method), hook) is not getattr(Method, hook)


@functools.cache
def find_methods() -> tuple[type[Method], ...]:
    """Return the methods in this folder, in the order of their names."""
    found = [m for module in load_built_in().values() for m in find_classes(module, Method)]
    return tuple(sorted(found, key=lambda method: method.name))


def build_methods(settings: Settings | Mapping[str, Any]) -> dict[str, Method]:
    """Build the methods that a run's settings use, by name.

    The settings may be blocks of them, such as ``{"objective": objective}``, for the loss alone.
    """
    methods = {
        method.name: method(own)
        for method in find_methods()
        if (own := method.find(settings)) is not None
    }
    for entry in get(settings, "methods") or ():
        method = load_own(entry)
        others = {known.name for known in find_methods() if known is not type(method)}
        if method.name in others | methods.keys():
            raise UserError(f"methods: {entry.file} has the name {method.name!r} of another method")
        methods[method.name] = method
    for hook in ("choose", "variant", "write", "revise"):
        names = [name for name, method in methods.items() if overrides(method, hook)]
        if len(names) > 1:
            raise UserError(f"methods {' and '.join(names)} both have the hook {hook}: remove one")
    return methods


def load_own(entry: OwnMethod) -> Method:
    """Load a method from its file; raises ``UserError`` if there is none, or a wrong one."""
    found = find_classes(load_method_file(entry), Method)
    if len(found) != 1:
        names = ", ".join(method.__name__ for method in found) or "none"
        raise UserError(f"methods: {entry.file} must define one subclass of Method, not {names}")
    (method,) = found
    if not isinstance(getattr(method, "name", None), str) or not method.name.isidentifier():
        raise UserError(f"methods: {entry.file}: {method.__name__}.name must be a word")
    return method(read_own_settings(entry))
