"""A check of the shared-prefix form on the very model that is used.

The same completions are sampled and scored with a shared prompt, and scored by transformers' own
forward with the prompt repeated. The differences of their log-probabilities are rounding, or the
model computes something that the shared form does not know. In that case the prompt is repeated
from then on, or the run ends, as ``policy.engine`` says. If captured decode steps are to blame,
later ones run eagerly instead.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.activations import eval_mode
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.types import Group, Prompt

if TYPE_CHECKING:
    from vlm_grpo.model.policy import Policy

logger = logging.getLogger(__name__)

ROLLOUT_LENGTH = 8
"""Number of tokens of the completions sampled by the first check."""
BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest mean difference of log-probabilities, in nats, that is taken for rounding: recurrent
layers compute in float32, and lose more digits than attention does."""
HALF_BOUND = 0.05
"""The same bound in half precision."""
GROWTH = 2
"""A shape is checked if it exceeds all checked ones by this factor."""


class FormCheck:
    """The checks of one policy: of its own first samples, and of larger groups than before.

    Args:
        must_share: whether a failed check is an error, rather than the end of the shared form.

    Attributes:
        checked: greatest number of tokens of a prompt and of a completion in any check; None: no
            check was made.
        has_seen_images: whether a checked prompt had images.
    """

    def __init__(self, must_share: bool) -> None:
        self.must_share = must_share
        self.checked: tuple[int, int] | None = None
        self.has_seen_images = False

    def begin(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Check short completions of one of the first prompts, and of one of the first with images.

        Raises:
            UserError: the check failed, and the prompt must be shared.
        """
        prompt = next((prompt for prompt in prompts if prompt.example.images), prompts[0])
        has_images = bool(prompt.example.images)
        if self.checked is not None and (self.has_seen_images or not has_images):
            return
        self.has_seen_images = has_images
        self._raise_checked(len(prompt.token_ids), ROLLOUT_LENGTH)
        try:
            self._run(policy, lambda: try_form(policy, prompt))
        finally:
            policy.clear_image_features()

    def is_larger(self, groups: Sequence[Group]) -> bool:
        """Return whether a group is much larger than all that were checked, if any were."""
        return any(self._growth(group) > GROWTH for group in groups)

    def _growth(self, group: Group) -> float:
        """Return by which factor the group exceeds the shapes that were checked."""
        if group.prompt.example.images and not self.has_seen_images:
            return math.inf
        known = self.checked or (1, 1)
        return max(n / k for n, k in zip(_measure(group), known, strict=True))

    def check(self, policy: Policy, groups: Sequence[Group]) -> None:
        """Check the longest completion of the group that exceeds the checked shapes the most.

        Without a group the model still runs as often as on other ranks. A completion that does not
        fit into the memory in one of the forms is not checked.

        Raises:
            UserError: as for ``begin``.
        """
        batch = policy.dummy_batch()
        if groups:
            group = max(groups, key=self._growth)
            longest = max(group.completions, key=lambda completion: len(completion.token_ids))
            batch = MicroBatch((GroupSlice(group.prompt, (longest.token_ids,), (0,)),))
            self._raise_checked(*_measure(group))
            self.has_seen_images |= bool(group.prompt.example.images)
        with contextlib.suppress(torch.OutOfMemoryError):
            self._run(policy, lambda: _find_failure(lambda: compare(policy, batch)))

    def _run(self, policy: Policy, check: Callable[[], str | None]) -> None:
        """Run a check, whose work does not count, and end the shared form if it fails."""
        counters, policy.counters = policy.counters, type(policy.counters)()
        try:
            problem = check()
            if problem is not None and policy.use_capture(None):
                captured, problem = problem, check()
                if problem is None:
                    logger.warning(
                        "decode steps run eagerly from now on, which takes longer: as CUDA "
                        "graphs, %s",
                        captured,
                    )
        finally:
            policy.counters = counters
        if problem is None:
            return
        if self.must_share:
            raise UserError(
                f"policy.engine=shared does not work with this model: {problem}; remove it, or "
                "set policy.engine=repeated"
            )
        logger.warning(
            "from now on the prompt is repeated for each completion (policy.engine=repeated), "
            "which takes longer: with a shared prompt, %s",
            problem,
        )
        policy.repeat_prompts()

    def _raise_checked(self, prompt: int, completion: int) -> None:
        known = self.checked or (0, 0)
        self.checked = max(prompt, known[0]), max(completion, known[1])


def try_form(policy: Policy, prompt: Prompt) -> str | None:
    """Sample short completions of a prompt, and return what is wrong with the shared form.

    Returns:
        How the forms differ, or how the model fails; None: they differ by rounding.
    """
    settings = SamplingSettings(policy.distribution, ROLLOUT_LENGTH)

    def sample_and_compare() -> str | None:
        (group,) = policy.sample([prompt], settings, 2, [(0,)])
        tokens = tuple(completion.token_ids for completion in group)
        batch = MicroBatch((GroupSlice(prompt, tokens, (0, 1)),))
        sampled = [logprob for completion in group for logprob in completion.logprobs]
        return compare(policy, batch, sampled)

    return _find_failure(sample_and_compare)


def _find_failure(run: Callable[[], str | None]) -> str | None:
    """Return the result of ``run``, or how the model fails."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = str(error).splitlines() or ["no message"]
        return f"the model fails ({type(error).__name__}: {message[0]})"


@torch.no_grad()
def compare(policy: Policy, batch: MicroBatch, sampled: Sequence[float] = ()) -> str | None:
    """Score a batch in both forms, and return how they differ; None: within rounding.

    Args:
        policy: a policy with shared prompts.
        batch: the batch.
        sampled: log-probabilities of the batch's tokens when they were sampled, if known.
    """
    with eval_mode(policy.model):  # two passes with dropout would differ
        shared = policy.score(batch).logprobs.double()
        plain = policy.score_plain(batch).logprobs.double()
    bound = BOUNDS.get(policy.compute_dtype, HALF_BOUND)
    pairs = [("scored", shared)]
    if sampled:
        pairs.append(("sampled", torch.tensor(sampled).to(shared)))
    for verb, found in pairs:
        difference = float((found - plain).abs().mean())
        if not difference <= bound:  # also if it is NaN
            return (
                f"the log-probs of {verb} tokens differ by {difference:.1e} nats on average from "
                f"those of transformers (rounding: at most {bound:g})"
            )
    return None


def _measure(group: Group) -> tuple[int, int]:
    longest = max(len(completion.token_ids) for completion in group.completions)
    return len(group.prompt.token_ids), longest
