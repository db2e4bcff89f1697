"""The shuffled stream of training examples."""

from collections import Counter

import pytest
from groups import EXAMPLES, build_mixture

from vlm_grpo.config.run import Settings
from vlm_grpo.data.prompt_order import ExampleStream, build_stream
from vlm_grpo.types import Example


def test_every_epoch_contains_every_example_once_in_another_order():
    stream = ExampleStream(EXAMPLES, seed=0)
    epochs = [[stream[20 * epoch + i].id for i in range(20)] for epoch in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(example.id for example in EXAMPLES)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_example_depends_only_on_the_seed_and_the_index():
    streams = (ExampleStream(EXAMPLES, seed) for seed in (7, 7, 8))
    in_order, same, other = ([stream[index].id for index in range(60)] for stream in streams)
    stream = ExampleStream(EXAMPLES, seed=7)
    assert in_order == same == [stream[index].id for index in reversed(range(60))][::-1]
    assert other != in_order


@pytest.mark.parametrize(
    ("data", "shares"),
    [
        ({}, {"a": 0.3, "b": 0.1, "c": 0.6}),
        ({"mixing_temperature": 1e9}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}),
        ({"mixing_temperature": 2.0}, {"a": 0.33427, "b": 0.19299, "c": 0.47273}),
        ({"weights": {"a": 2.0, "c": 5.0}}, {"a": 0.25, "b": 0.125, "c": 0.625}),
    ],
)
def test_every_stretch_of_a_mixture_has_close_to_the_right_shares(data, shares):
    stream = build_mixture({"a": 30, "b": 10, "c": 60}, **data)
    drawn = [stream[index].source for index in range(9000)]
    for start in (0, 17, 4090, 8000):  # the second last crosses the end of a block
        for length in (16, 100, 900):
            found = Counter(drawn[start : start + length])
            for name, share in shares.items():
                assert abs(found[name] - share * length) <= 2.5


def test_each_source_of_a_mixture_has_epochs_of_its_own():
    counts = {"a": 30, "b": 10}
    stream = build_mixture(counts, mixing_temperature=1e9)
    drawn = [stream[index].id for index in range(9000)]
    for name, count in counts.items():
        own = [example for example in drawn if example.startswith(name)]
        for start in range(0, len(own) - count, count):
            assert len({*own[start : start + count]}) == count
    equal = build_mixture({"a": 10, "b": 10})
    names = [equal[index].id for index in range(40)]
    orders = [[name[2:] for name in names if name.startswith(source)][:10] for source in "ab"]
    assert orders[0] != orders[1]


def test_a_mixture_is_a_function_of_the_index():
    counts = {"a": 30, "b": 10, "c": 60}
    in_order = [build_mixture(counts)[index].id for index in range(20)]
    late = build_mixture(counts)
    far = late[1_000_000].id
    assert [late[index].id for index in reversed(range(20))] == in_order[::-1]
    assert build_mixture(counts)[1_000_000].id == far
    assert [build_mixture(counts, seed=1)[index].id for index in range(20)] != in_order
    stream = build_mixture(counts)
    assert [stream[i].id for i in (4095, 4096, 4097)] == [late[i].id for i in (4095, 4096, 4097)]


def test_rows_that_name_their_tasks_are_one_source():
    settings = Settings(task="counting", data={"train": [{"source": "x.jsonl", "name": "x"}]})
    examples = [Example(str(n), (), "?", n, source=f"x/{'ab'[n % 2]}") for n in range(10)]
    assert {build_stream(examples, settings).locate(index)[0] for index in range(10)} == {0}
