"""The endless shuffled stream of training examples."""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.types import Example

_BLOCK = 4096  # Number of positions of a mixture that are assigned to sources at once
_GOLDEN_RATIO = (1 + 5**0.5) / 2


class Choice(Protocol):
    """A choice among the next indices of a stream."""

    pool: int  # number of indices per chosen one

    def choose(self, position: int, count: int, /) -> Sequence[int]:
        """Return ``count`` of the ``count * pool`` indices from ``position`` on."""
        ...


class ExampleStream:
    """An endless stream that contains every example of a source once per epoch, in a new order.

    The stream is a pure function of the index: a resumed run needs only that integer to continue
    exactly where it stopped, and ranks agree without communication. Several sources are mixed in
    fixed shares, as evenly as possible: the source of position i is that in whose part of [0, 1)
    the fractional part of i times the golden ratio falls, so that every stretch of the stream has
    close to the right shares.

    ``sources`` has the rows of each source (None: all examples are of one), and ``shares`` their
    shares, which sum to 1.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        sources: Sequence[Sequence[int]] | None = None,
        shares: Sequence[float] = (1.0,),
    ) -> None:
        self.examples, self.seed = examples, seed
        self._sources = [range(len(examples))] if sources is None else sources
        self._bounds = np.cumsum(shares)[:-1]
        self._order = lru_cache(maxsize=2 * len(self._sources))(self._shuffle)
        self._block = lru_cache(maxsize=4)(self._assign)
        self._counts = [np.zeros(len(self._sources), int)]

    def __getitem__(self, index: int) -> Example:
        """Return the example at position ``index``, counted from the start of the run."""
        return self.examples[self.locate(index)[1]]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the index's source, and its row among the training examples."""
        source, place = (0, index) if len(self._sources) == 1 else self._find_source(index)
        rows = self._sources[source]
        epoch, position = divmod(place, len(rows))
        return source, rows[self._order(source, epoch)[position]]

    def _find_source(self, index: int) -> tuple[int, int]:
        """Return the source of an index, and its number among the indices of this source."""
        block, position = divmod(index, _BLOCK)
        while len(self._counts) <= block:
            own = self._block(len(self._counts) - 1)
            self._counts.append(self._counts[-1] + np.bincount(own, minlength=len(self._sources)))
        own = self._block(block)
        source = int(own[position])
        return source, int(self._counts[block][source] + np.sum(own[:position] == source))

    def _shuffle(self, source: int, epoch: int) -> np.ndarray:
        seeds = [self.seed, epoch] if len(self._sources) == 1 else [self.seed, source, epoch]
        return np.random.default_rng(seeds).permutation(len(self._sources[source]))

    def _assign(self, block: int) -> np.ndarray:
        positions = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=float)
        return np.searchsorted(self._bounds, positions * _GOLDEN_RATIO % 1, side="right")


def build_stream(examples: Sequence[Example], settings: Settings) -> ExampleStream:
    """Build the stream of a run's training examples, which mixes the sources of a mixture."""
    parts: dict[str, array[int]] = {}
    if settings.is_mixture:
        for index, example in enumerate(examples):
            # Of rows that name their task, the source is "SOURCE/TASK".
            parts.setdefault(example.source.partition("/")[0], array("Q")).append(index)
    if len(parts) < 2:
        return ExampleStream(examples, settings.seed)
    shares = compute_shares({name: len(own) for name, own in parts.items()}, settings.data)
    return ExampleStream(examples, settings.seed, list(parts.values()), list(shares.values()))


def compute_shares(counts: Mapping[str, int], data: DataSettings) -> dict[str, float]:
    """Return the share of each source of a mixture in the prompts, given its number of examples.

    They follow the weights of the sources or ``mixing_temperature``, and sum to 1.
    """
    given = {source.label: source.weight for source in data.get_sources("train")}
    if any(weight is not None for weight in given.values()):
        weights = {name: given[name] or 1.0 for name in counts}
    else:
        exponent = 1 / (data.mixing_temperature or 1.0)
        weights = {name: count**exponent for name, count in counts.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


class StreamCursor:
    """The place of a run in its stream: the number of indices that were taken, and those among
    them that were ``returned`` unused, which are taken again first."""

    def __init__(self, position: int = 0, returned: Sequence[int] = ()) -> None:
        self.position, self.returned = position, list(returned)

    def peek(self, count: int, choice: Choice | None = None) -> tuple[int, ...]:
        """Return the next ``count`` indices, or those that ``choice`` chooses of more."""
        again = self.returned[:count]
        missing = count - len(again)
        if choice is None:
            return (*again, *range(self.position, self.position + missing))
        return (*again, *choice.choose(self.position, missing))

    def take(self, count: int, choice: Choice | None = None) -> tuple[int, ...]:
        """Return what ``peek`` does, and advance beyond it."""
        indices = self.peek(count, choice)
        pool = 1 if choice is None else choice.pool
        self.position += (count - len(self.returned[:count])) * pool
        del self.returned[:count]
        return indices
