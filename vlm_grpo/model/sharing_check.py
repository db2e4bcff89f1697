"""Whether passes may share a prompt, by a model's configuration and by a check on the model itself.

Completions are sampled and scored with a shared prompt, and scored by transformers' own forward
with the prompt repeated. Their log-probabilities differ by rounding, or the model computes
something that passes with a shared prompt do not know.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Cache

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.families.family import RECURRENT_TYPES, Family
from vlm_grpo.types import Group, Prompt

LAYER_TYPES = {"full_attention", "sliding_attention"} | RECURRENT_TYPES  # can share a prompt
ROLLOUT_LENGTH = 8  # tokens of the completions that the first check samples
# Largest mean difference of log-probabilities, in nats, that is taken for rounding: recurrent
# layers compute in float32, and lose more digits than attention does.
BOUND = 1e-3
HALF_BOUND = 0.05  # the same in half precision
GROWTH = 2  # a shape is checked if it exceeds all checked ones by this factor


def why_not_shared(family: Family, config: Any) -> str | None:
    """Return the reason why completions cannot share a prompt, or None: ``SharingCheck`` shows
    whether they can."""
    text = config.get_text_config()
    model: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)  # noqa: SLF001
    if model is None:
        return "its code does not come with transformers"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if getattr(text, "cross_attention_layers", None):
        return "its language model reads images by cross-attention"
    parameters = inspect.signature(model.forward).parameters
    if type(family).run is Family.run and "mm_encoder_outputs" not in parameters:
        return "its model takes no precomputed image features (transformers 5.18 and later may)"
    kinds = getattr(text, "layer_types", None) or ()
    if others := set(kinds) - LAYER_TYPES:
        return f"it has layers of the type {', '.join(sorted(others))}"
    if RECURRENT_TYPES.intersection(kinds) and not hasattr(Cache, "get_conv_state"):
        return "its recurrent layers need transformers 5.21 or later"
    return None


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
