"""Packing keeps every completion once, within the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.model.engine.packing import GroupSlice, pack
from vlm_grpo.types import Example, Prompt


def make_slice(prompt_length: int, lengths: list[int], first_row: int = 0) -> GroupSlice:
    example = Example(f"p{first_row}", (), "?", 0)
    completions = tuple((1,) * length for length in lengths)
    rows = tuple(range(first_row, first_row + len(lengths)))
    return GroupSlice(Prompt(example, "", (0,) * prompt_length, {}), completions, rows)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 30), min_size=1, max_size=9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
)
def test_every_completion_is_packed_once_within_the_budget(groups, budget):
    slices, row = [], 0
    for prompt_length, lengths in groups:
        slices.append(make_slice(prompt_length, lengths, row))
        row += len(lengths)
    batches = pack(slices, budget)
    assert sorted(r for batch in batches for r in batch.rows) == list(range(row))
    for batch in batches:
        # A prompt with a single completion cannot be split further.
        assert batch.num_tokens <= budget or len(batch.rows) == 1
    expected = {r: c for s in slices for r, c in zip(s.rows, s.completions, strict=True)}
    for batch in batches:
        assert [expected[r] for r in batch.rows] == list(batch.completions)


def test_a_completion_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        make_slice(3, [2, 0])


def test_slices_that_fill_the_budget_exactly_share_a_micro_batch():
    slices = [make_slice(tokens, [1], row) for row, tokens in enumerate((3, 6, 7, 4))]
    assert [batch.rows for batch in pack(slices, 10)] == [(2, 0), (1, 3)]
