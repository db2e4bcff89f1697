"""A check of passes that share a prompt, on the very model that is used.

Completions are sampled and scored with a shared prompt, and scored by transformers' own forward
with the prompt repeated. Their log-probabilities differ by rounding, or the model computes
something that passes with a shared prompt do not know.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.types import Group, Prompt

ROLLOUT_LENGTH = 8  # tokens of the completions that the first check samples
# Largest mean difference of log-probabilities, in nats, that is taken for rounding: recurrent
# layers compute in float32, and lose more digits than attention does.
BOUND = 1e-3
HALF_BOUND = 0.05  # the same in half precision
GROWTH = 2  # a shape is checked if it exceeds all checked ones by this factor


class SharingCheck:
    """What of one policy is to be checked: its own first samples, and larger groups than before.

    ``must_share``: a failed check is an error, rather than the end of sharing.
    """

    def __init__(self, must_share: bool) -> None:
        self.must_share = must_share
        self.checked: tuple[int, int] | None = None  # most tokens of a prompt, and of a completion
        self.has_seen_images = False

    def choose(self, prompts: Sequence[Prompt]) -> Prompt | None:
        """Return one of the first prompts, and one of the first with images; None: nothing new."""
        prompt = next((prompt for prompt in prompts if prompt.example.images), prompts[0])
        if self.checked and (self.has_seen_images or not prompt.example.images):
            return None
        self._note(prompt, ROLLOUT_LENGTH)
        return prompt

    def is_larger(self, groups: Sequence[Group]) -> bool:
        """Return whether a group is much larger than all that were checked, if any were."""
        return any(self._growth(group) > GROWTH for group in groups)

    def choose_batch(self, groups: Sequence[Group]) -> MicroBatch | None:
        """Return the longest completion of the group that exceeds the checked shapes the most."""
        if not groups:
            return None
        group = max(groups, key=self._growth)
        longest = max(group.completions, key=lambda completion: len(completion.token_ids))
        self._note(group.prompt, len(longest.token_ids))
        observed = (longest.observations,) if longest.observations else ()
        return MicroBatch((GroupSlice(group.prompt, (longest.token_ids,), (0,), observed),))

    def _growth(self, group: Group) -> float:
        if group.prompt.example.images and not self.has_seen_images:
            return math.inf
        prompt, completion = self.checked or (1, 1)
        longest = max(len(completion.token_ids) for completion in group.completions)
        return max(len(group.prompt.token_ids) / prompt, longest / completion)

    def _note(self, prompt: Prompt, completion: int) -> None:
        known = self.checked or (0, 0)
        self.checked = max(len(prompt.token_ids), known[0]), max(completion, known[1])
        self.has_seen_images |= bool(prompt.example.images)


@contextlib.contextmanager
def explain_failure() -> Iterator[None]:
    """Raise a ``UserError`` for a model that fails with a shared prompt inside.

    A lack of memory, and what is wrong in a call, such as a TypeError, stay as they are.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, RuntimeError, ValueError) as error:
        message = str(error).splitlines() or ["no message"]
        raise UserError(
            f"with a shared prompt, the model fails ({type(error).__name__}: {message[0]}): set "
            "policy.engine=repeated, which repeats the prompt for each completion and takes longer"
        ) from error
