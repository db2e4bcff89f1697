"""The turns of a chat, the places of its images, and how a model marks its thinking."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]

IMAGE = "<image>"
"""Stands for one of an example's images or clips in a question or a turn, as in other trainers'
data, where that of a clip is ``VIDEO``."""
VIDEO = "<video>"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Names that chat templates give to the switch of a model's thinking."""


@dataclass(frozen=True)
class Turn:
    """One message of a chat; each ``<image>`` in its text stands for the example's next image."""

    role: Role
    text: str

    @property
    def parts(self) -> tuple[str | None, ...]:
        """Return the texts, and None for each image, in their order.

        >>> Turn("user", "Is <image> like <image>?").parts
        ('Is ', None, ' like ', None, '?')
        """
        first, *others = self.text.split(IMAGE)
        parts = [first, *(part for text in others for part in (None, text))]
        return tuple(part for part in parts if part != "") or ("",)

    def build_content(self, images: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the content of a message: its texts, and the next one of the images' parts."""
        return [next(images) if p is None else {"type": "text", "text": p} for p in self.parts]


def place_images(turns: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    """Return a chat with a user's turn in which each of ``count`` images has its ``<image>``.

    Without any, all images stand before the text of the first user's turn. ``ValueError``: it has
    another number of them.
    """
    found = sum(turn.text.count(IMAGE) for turn in turns)
    if found and found != count:
        raise ValueError(
            f"it has {found} {IMAGE} in its texts and {count} images: each {IMAGE} stands for one "
            "image; without any, all images stand before the first question"
        )
    if found or not count:
        return tuple(turns)
    first = next(i for i, turn in enumerate(turns) if turn.role == "user")
    placed = replace(turns[first], text=IMAGE * count + turns[first].text)
    return (*turns[:first], placed, *turns[first + 1 :])


@dataclass(frozen=True)
class ThinkingTags:
    """The texts before and after a model's thinking."""

    opening: str = "<think>"
    closing: str = "</think>"
    # the prompt ends with ``opening``, so that a completion begins within the thinking
    is_open: bool = False
    is_native: bool = False  # the chat template lets the model think, without a request in words

    def normalize(self, text: str) -> str:
        """Return a completion with its thinking, if it has any, in ``<think>…</think>``.

        >>> ThinkingTags("[THINK]", "[/THINK]", is_open=True).normalize("Two.[/THINK]2")
        '<think>Two.</think>2'
        """
        if self.is_open and not text.lstrip().startswith(self.opening):
            text = self.opening + text
        return text.replace(self.opening, "<think>").replace(self.closing, "</think>")

    def enclose(self, thinking: str, answer: str) -> str:
        opening = "" if self.is_open else self.opening
        if not self.is_native:  # requested in words, which name these tags
            return f"<think>{thinking}</think>{answer}"
        return f"{opening}{thinking}{self.closing}{answer}"


THINK_TAGS = ThinkingTags()  # the tags of most models, and of a thinking that is requested in words
