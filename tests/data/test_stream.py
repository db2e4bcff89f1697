"""The shuffled stream of training examples."""

from __future__ import annotations

from collections import Counter

from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.types import Example

EXAMPLES = [Example(str(number), (), "?", number) for number in range(20)]


def test_every_epoch_contains_every_example_once_in_another_order() -> None:
    stream = ExampleStream(EXAMPLES, seed=0)
    epochs = [[stream[20 * epoch + i].id for i in range(20)] for epoch in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(example.id for example in EXAMPLES)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_example_depends_only_on_the_seed_and_the_index() -> None:
    stream = ExampleStream(EXAMPLES, seed=7)
    in_order = [stream[index].id for index in range(60)]
    assert [ExampleStream(EXAMPLES, seed=7)[index].id for index in range(60)] == in_order
    assert [stream[index].id for index in reversed(range(60))] == in_order[::-1]
    assert [ExampleStream(EXAMPLES, seed=8)[index].id for index in range(60)] != in_order
