"""Micro-batches of a step's groups under a token budget, and other amounts that are computed or
held at once; a plan reads them without torch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vlm_grpo.types import ImageRef, Observation, Prompt

PREFILL_TOKENS = 16_384  # maximum number of tokens prefilled at once, or those of one longer prompt
ENCODER_PATCHES = 65_536
"""Maximum number of patches per pass: 12.8 million pixels in patches of 14 × 14."""
LOGIT_BYTES = 5 * 4 + 2 * 8
"""Bytes per logit of a sampled token, besides the logit: copies in float32, and the order and sums
of the probabilities."""
TRUNK_TOKENS = 8
"""Tokens that a trunk must save: attention over it is computed apart."""
RECENT_IMAGES = 64  # number of decoded images kept for other examples that use them
ROUNDED_AT_ONCE = 1 << 24
"""Number of updated values that are rounded stochastically at once, with 4 random bytes each."""


@dataclass(frozen=True)
class Path:
    """A completion's T tokens and what it observed between them, in the order of reading."""

    tokens: tuple[int, ...]
    observations: tuple[Observation, ...] = ()

    @cached_property
    def token_ids(self) -> np.ndarray:
        """(n,) the tokens with those of the observations."""
        starts = [observation.start for observation in self.observations]
        own = np.split(np.array(self.tokens, dtype=np.int64), starts)
        observed = [np.array(o.prompt.token_ids, dtype=np.int64) for o in self.observations]
        pairs = itertools.zip_longest(own, observed, fillvalue=np.empty(0, np.int64))
        return np.concatenate([part for pair in pairs for part in pair])

    @cached_property
    def sampled(self) -> np.ndarray:
        """(T,) index in ``token_ids`` of each of the completion's own tokens."""
        places = np.arange(len(self.tokens))
        for observation in self.observations:
            places[observation.start :] += len(observation.prompt.token_ids)
        return places

    @property
    def num_fed(self) -> int:
        """The number of tokens that are fed: the last one is predicted only."""
        return len(self.tokens) - 1 + sum(len(o.prompt.token_ids) for o in self.observations)

    @property
    def fork(self) -> int:
        """The number of fed tokens up to the end of the first observation; without one, all."""
        if not self.observations:
            return self.num_fed
        return self.observations[0].start + len(self.observations[0].prompt.token_ids)


class Segment(NamedTuple):
    """Tokens of a path that are fed once, perhaps for several completions."""

    members: tuple[int, ...]  # numbers of those completions in their slice, whose tokens are equal
    start: int
    stop: int
    parent: int = -1  # number of the segment that it continues; -1: the prompt


def split_paths(paths: Sequence[Path], trunks: Sequence[int] = ()) -> tuple[Segment, ...]:
    """Return the segments of a slice's completions by trunks, those of one completion last."""
    groups: dict[object, list[int]] = {}
    for member in range(len(paths)):
        groups.setdefault(trunks[member] if trunks else member, []).append(member)
    found, branches = list[Segment](), list[Segment]()
    for root, members in enumerate(sorted(groups.values(), key=lambda own: len(own) == 1)):
        own = [paths[member] for member in members]
        fork = own[0].fork
        if len(own) > 1 and not own[0].observations:
            fork = _count_common([path.tokens[: path.num_fed] for path in own])
        found.append(Segment(tuple(members), 0, fork if len(own) > 1 else own[0].num_fed))
        for member, path in zip(members, own, strict=True) if len(own) > 1 else ():
            if path.num_fed > fork or path.observations:
                branches.append(Segment((member,), fork, path.num_fed, root))
    return (*found, *branches)


def find_trunks(completions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the trunk of each completion, by whose common beginnings most tokens are passed once;
    empty: they save less than ``TRUNK_TOKENS`` each.

    >>> find_trunks([(1,) * 12 + (2, 3), (5, 6), (1,) * 12 + (4, 4), (5, 7)])
    (0, 1, 0, 3)
    """
    order = sorted(range(len(completions)), key=completions.__getitem__)
    fed = [completions[number][:-1] for number in order]
    common = [_count_common(pair) for pair in itertools.pairwise(fed)]

    def choose(first: int, stop: int) -> tuple[int, list[range]]:
        """Return the saved tokens and the trunks of neighbors, with one trunk or several."""
        if stop - first < 2:
            return 0, []
        least = min(common[first : stop - 1])
        edges = [n + 1 for n in range(first, stop - 1) if common[n] == least]
        parts = [choose(*pair) for pair in itertools.pairwise((first, *edges, stop))]
        apart = sum(saved for saved, _ in parts), [r for _, found in parts for r in found]
        joint = least * (stop - first - 1) - TRUNK_TOKENS, [range(first, stop)]
        return max(apart, joint, key=operator.itemgetter(0))

    trunks = list(range(len(completions)))
    for members in choose(0, len(order))[1]:
        for place in members:
            trunks[order[place]] = min(order[n] for n in members)
    return tuple(trunks) if len({*trunks}) < len(trunks) else ()


def _count_common(completions: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all begin."""
    columns = enumerate(zip(*completions, strict=False))
    differ = (n for n, column in columns if any(token != column[0] for token in column))
    return next(differ, min(map(len, completions)))


@dataclass(frozen=True)
class GroupSlice:
    """Some or all completions of one group, scored behind one copy of their prompt.

    ``ValueError``: a completion has no tokens.
    """

    prompt: Prompt
    completions: tuple[tuple[int, ...], ...]
    """Token ids of each completion, at least one token each."""
    rows: tuple[int, ...]  # index of each completion among all completions of the step
    # what stands between the tokens of each completion; empty: nothing does in any of them
    observations: tuple[tuple[Observation, ...], ...] = ()
    # number of each completion's trunk: those of one trunk have equal tokens up to the end of their
    # first observation, or have none and begin alike; empty: no tokens are passed for several
    trunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(len, self.completions)):  # the others' places would be counted wrongly
            raise ValueError(f"a completion of {self.prompt.example.name} has no tokens")

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed row: a completion's last token is predicted, never fed."""
        own = sum(segment.stop - segment.start for segment in self.segments)
        return len(self.prompt.token_ids) + own

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What is fed behind the prompt: trunks and completions without one, then branches."""
        return split_paths(self.paths, self.trunks)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The tokens of each completion with those of its observations."""
        observations = self.observations or ((),) * len(self.completions)
        return tuple(map(Path, self.completions, observations))

    def select(self, chosen: slice) -> GroupSlice:
        parts = self.completions[chosen], self.rows[chosen], self.observations[chosen]
        return GroupSlice(self.prompt, *parts, self.trunks[chosen])


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
        observed = (o.prompt for s in self.slices for own in s.observations for o in own)
        prompts = (*(piece.prompt for piece in self.slices), *observed)
        return {image for prompt in prompts for image in prompt.example.images}

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)


def pack(slices: Sequence[GroupSlice], max_tokens: int) -> list[MicroBatch]:
    """Pack every slice into micro-batches of at most ``max_tokens`` tokens.

    A slice that exceeds the budget is halved until each part fits or holds a single completion;
    a single completion that exceeds the budget is a micro-batch by itself. Slices are placed
    longest first, each into the first micro-batch with room.
    """
    pieces = [(part.num_tokens, part) for piece in slices for part in _split(piece, max_tokens)]
    pieces.sort(key=lambda sized: -sized[0])
    batches: list[list[GroupSlice]] = []
    unfilled: list[tuple[int, list[GroupSlice]]] = []  # those with room for the smallest piece
    for tokens, piece in pieces:
        for index, (room, members) in enumerate(unfilled):
            if tokens <= room:
                members.append(piece)
                unfilled[index] = (room - tokens, members)
                break
        else:
            index = len(unfilled)
            batches.append([piece])
            unfilled.append((max_tokens - tokens, batches[-1]))
        if unfilled[index][0] < pieces[-1][0]:
            del unfilled[index]
    return [MicroBatch(tuple(members)) for members in batches]


def _split(piece: GroupSlice, max_tokens: int) -> Iterator[GroupSlice]:
    if piece.num_tokens <= max_tokens or len(piece.rows) == 1:
        yield piece
        return
    middle = len(piece.rows) // 2
    for half in (slice(middle), slice(middle, None)):
        yield from _split(piece.select(half), max_tokens)


def fit_tokens(memory: int, token: int, place: int, completions: tuple[int, int]) -> int:
    """Return the number of tokens whose keys and values fit into memory, with the logits of the
    completions sampled at once, and a fifth to spare for other activations.

    Args:
        memory: bytes of free memory; may be negative.
        token: bytes of a token's keys and values.
        place: bytes of a completion's logits and recurrent states.
        completions: number of completions, and maximum number of tokens per completion.
    """
    usable, (count, longest) = 0.8 * memory, completions
    # All completions at once, or as many as the tokens have places for.
    every, some = (usable - count * place) / token, usable / (token + place / longest)
    return max(0, int(max(every, some)))
