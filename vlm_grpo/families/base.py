"""What the toolkit needs to know of a model family, and nothing that two families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vlm_grpo.types import Prompt


@dataclass(frozen=True)
class PixelBudget:
    """How large an image may reach the vision tower, in pixels after the resize."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class ImageFeatures:
    """What the vision tower makes of one image.

    Attributes:
        embeds: one vector per image token, (tokens, width).
        deepstack: for families that feed deeper features into the first language layers, one
            (tokens, width) tensor per layer.
    """

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


class Family:
    """One architecture family: its coordinate frame, its parts, and how it reads a prompt.

    The base class serves any image-text model that transformers loads, in repeated form: it
    relies on the model's own ``forward`` and ``generate`` alone. A family that can share a
    prompt between completions overrides the second half.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    frame: ClassVar[str] = "permille"
    """Name of the coordinate frame in which the family writes boxes."""
    answer_tokens: ClassVar[str] = ""
    """Pattern of the special tokens that belong to an answer, such as those around a box; all other
    special tokens (ends, padding, images) are left out of completions' texts."""
    parts: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Module-name prefixes of the parts that can be frozen: vision, projector, language."""

    def why_not_shared(self, config: Any) -> str | None:
        """Why the family cannot share one prompt pass between completions; None if it can."""
        return f"no shared-prefix form is known for the model type {config.model_type!r}"

    def resized_size(self, size: tuple[int, int], budget: PixelBudget, processor: Any) -> tuple:
        """Width and height in pixels at which the model sees an image of ``size``."""
        return size

    def image_tokens(self, size: tuple[int, int], processor: Any) -> int:
        """Tokens of an image that the model sees at ``size``; 0 where all have equally many."""
        return 0

    def pixel_budget(self, processor: Any) -> PixelBudget | None:
        """The processor's own budget, or None where the family resizes to a fixed size."""
        return None

    def set_pixel_budget(self, processor: Any, budget: PixelBudget) -> None:
        """Make ``budget`` the processor's own, so that it is saved with the model."""

    def resize(self, image: Any, budget: PixelBudget, processor: Any) -> Any:
        """The PIL image at the size the model sees, or unchanged if its processor resizes."""
        return image

    def processor_kwargs(self) -> dict[str, Any]:
        """Further arguments for the processor's call on resized images."""
        return {}

    def banned_token_ids(self, config: Any) -> tuple[int, ...]:
        """Tokens that must not be sampled: each would break or corrupt the next forward pass."""
        names = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id")
        found = (getattr(config, name, None) for name in (*names, "vision_end_token_id"))
        return tuple(sorted({token for token in found if token is not None}))

    def decoder(self, tokenizer: Any) -> Callable[[Sequence[int]], str]:
        """What turns sampled tokens into the text that tasks read."""
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {
            i: tokenizer.convert_ids_to_tokens(i) for i in {*special, *tokenizer.all_special_ids}
        }
        dropped = {i for i, name in names.items() if not re.fullmatch(self.answer_tokens, name)}

        def decode(tokens: Sequence[int]) -> str:
            kept = [token for token in tokens if token not in dropped]
            return tokenizer.decode(kept, skip_special_tokens=False)

        return decode

    # The shared-prefix form: only families whose ``why_not_shared`` is None are asked.

    def language_model(self, model: Any) -> Any:
        raise NotImplementedError

    def encode_images(self, model: Any, vision: Sequence[dict]) -> list[ImageFeatures]:
        """Features of each image; ``vision`` holds the vision tensors of one image each."""
        raise NotImplementedError

    def split_images(self, prompt: Prompt) -> list[dict]:
        """The prompt's vision tensors, one dict per image, in order."""
        raise NotImplementedError

    def prompt_positions(self, model: Any, prompt: Prompt) -> torch.Tensor:
        """Rotary positions of the prompt's tokens, (3, T_prompt), int64."""
        raise NotImplementedError

    def language_inputs(
        self, model: Any, token_ids: torch.Tensor, features: Sequence[ImageFeatures]
    ) -> dict[str, Any]:
        """Arguments of the language model for rows of tokens.

        Args:
            token_ids: (rows, T) tokens, image placeholders among them.
            features: the features of the images in the order of their placeholders.

        Returns:
            ``inputs_embeds`` (rows, T, width) and whatever else the family feeds with it.
        """
        raise NotImplementedError
