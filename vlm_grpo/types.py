"""The nouns on the way from a dataset row to a loss.

``Example`` → ``Prompt`` → ``Completion`` → ``Group``: one row of data, the same row as one
model reads it, one sampled answer, and the G answers to one row with what they earned.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from vlm_grpo.utils.image_decode import decode

StopReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class ImageRef:
    """One image of an example: where its bytes are, its size, and the size the model sees.

    Exactly one of ``path`` and ``data`` is set. The pixels are not kept here: ``load`` decodes
    them afresh, so that a dataset of a million rows costs no memory.

    Attributes:
        name: what messages call the image (a path, or a row of a table).
        size: width and height of the original, in pixels.
        seen: width and height after the model family's resize, in pixels; equal to ``size``
            until a policy has said otherwise.
        path: the file that holds the image.
        data: the encoded image (PNG, JPEG, …) itself.
    """

    name: str
    size: tuple[int, int]
    resized_size: tuple[int, int]
    path: Path | None = None
    data: bytes | None = None

    def load(self) -> Image.Image:
        """Decode the image to RGB, as ``vlm_grpo.utils.image_decode.decode``.

        Raises:
            ValueError: the bytes are missing, are no whole image, or are no longer those of an
                image of this size; the message names it.
        """
        try:
            image = decode(self.path or io.BytesIO(self.data or b""))
        except ValueError as error:
            raise ValueError(f"image {self.name} cannot be read: {error}") from error
        if image.size != self.size:
            raise ValueError(
                f"image {self.name} has been changed: it has {image.width}x{image.height} pixels, "
                f"and had {self.size[0]}x{self.size[1]}"
            )
        return image


@dataclass(frozen=True)
class Example:
    """One row of a dataset.

    Attributes:
        id: unique within its dataset; groups are found by it.
        images: none, one, or several.
        question: what the row asks (for grounding, the expression to locate).
        answer: the gold answer in the task's own form (boxes are xyxy in original pixels).
        meta: every other column of the row, free for tasks and rewards.
    """

    id: str
    images: tuple[ImageRef, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """An example as one model reads it.

    Attributes:
        example: the row, its images' ``seen`` sizes set.
        text: the prompt after the chat template, before tokenization.
        token_ids: the prompt's tokens, image placeholders expanded, T_prompt of them.
        vision: the tensors that the family's vision tower takes, empty without images
            (for Qwen: ``pixel_values`` (patches, values) and ``image_grid_thw`` (images, 3)).
    """

    example: Example
    text: str
    token_ids: tuple[int, ...]
    vision: Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: the sampled tokens, T of them, the end-of-sequence token included.
        logprobs: log-probability of each token under the sampling distribution, in nats, T.
        text: the tokens decoded, without special tokens except those that belong to an answer.
        stop: why sampling ended: end-of-sequence token, stop string, or length limit.
        entropies: entropy of the sampling distribution at each token, in nats, T.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    stop: StopReason
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True)
class Score:
    """What a task makes of one completion.

    Attributes:
        answer: the parsed answer, or None where the text holds none.
        rewards: each reward by name, before weighting; None where it could not be computed.
        total: the weighted sum of the rewards; None when any of them is None (unscorable).
        metrics: each metric by name; None where it is undefined without an answer.
        failures: the traceback of what raised, by the reward's or metric's name, or "parse".
    """

    answer: Any
    rewards: Mapping[str, float | None]
    total: float | None
    metrics: Mapping[str, float | None]
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """One prompt, its G completions, and what each of them earned."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]

    @property
    def id(self) -> str:
        return self.prompt.example.id
