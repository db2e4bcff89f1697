"""Cutting a step's groups into micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlm_grpo.types import ImageRef, Prompt


@dataclass(frozen=True)
class GroupSlice:
    """Some or all completions of one group, to be run behind one copy of their prompt.

    Attributes:
        prompt: the group's prompt.
        completions: the tokens of each completion, at least one token each.
        rows: where each completion stands among all completions of the step.
    """

    prompt: Prompt
    completions: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the packed row: a completion's last token is predicted, never fed."""
        return len(self.prompt.token_ids) + sum(len(c) - 1 for c in self.completions)

    def halves(self) -> tuple[GroupSlice, GroupSlice]:
        middle = len(self.rows) // 2
        return (
            GroupSlice(self.prompt, self.completions[:middle], self.rows[:middle]),
            GroupSlice(self.prompt, self.completions[middle:], self.rows[middle:]),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Group slices that go through the model together."""

    slices: tuple[GroupSlice, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for piece in self.slices for row in piece.rows)

    @property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tokens for piece in self.slices for tokens in piece.completions)

    @property
    def images(self) -> set[ImageRef]:
        return {image for piece in self.slices for image in piece.prompt.example.images}

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.slices)


def pack(slices: Sequence[GroupSlice], max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` tokens that hold every slice once.

    A slice that exceeds the budget is halved until its parts fit or hold one completion; such a
    single completion is a micro-batch of its own even where it is longer than the budget. The
    slices are placed longest first, each into the first micro-batch with room.
    """
    pieces = [(piece.tokens, piece) for whole in slices for piece in _cut(whole, max_tokens)]
    pieces.sort(key=lambda sized: -sized[0])
    batches: list[list[GroupSlice]] = []
    open_ones: list[tuple[int, list[GroupSlice]]] = []  # with room for the smallest at least
    for tokens, piece in pieces:
        for place, (room, held) in enumerate(open_ones):
            if tokens <= room:
                held.append(piece)
                open_ones[place] = (room - tokens, held)
                break
        else:
            place = len(open_ones)
            batches.append([piece])
            open_ones.append((max_tokens - tokens, batches[-1]))
        if open_ones[place][0] < pieces[-1][0]:
            del open_ones[place]
    return [MicroBatch(tuple(held)) for held in batches]


def _cut(whole: GroupSlice, max_tokens: int) -> Iterator[GroupSlice]:
    """Its parts that fit, or hold one completion."""
    if whole.tokens <= max_tokens or len(whole.rows) == 1:
        yield whole
        return
    for half in whole.halves():
        yield from _cut(half, max_tokens)
