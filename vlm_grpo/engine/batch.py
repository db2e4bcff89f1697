"""Cutting a step's groups into micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
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
    fitting: list[GroupSlice] = []
    todo = list(slices)
    while todo:
        piece = todo.pop(0)
        if piece.tokens > max_tokens and len(piece.rows) > 1:
            todo[:0] = piece.halves()
        else:
            fitting.append(piece)
    bins: list[tuple[int, list[GroupSlice]]] = []
    for piece in sorted(fitting, key=lambda piece: -piece.tokens):
        for index, (used, held) in enumerate(bins):
            if used + piece.tokens <= max_tokens:
                held.append(piece)
                bins[index] = (used + piece.tokens, held)
                break
        else:
            bins.append((piece.tokens, [piece]))
    return [MicroBatch(tuple(held)) for _, held in bins]
