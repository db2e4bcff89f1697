"""Packing keeps every completion once, within the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.engine.batch import GroupSlice, pack
from vlm_grpo.types import Example, Prompt


def piece(prompt: int, lengths: list[int], first_row: int = 0) -> GroupSlice:
    example = Example(f"p{first_row}", (), "?", 0)
    completions = tuple((1,) * length for length in lengths)
    rows = tuple(range(first_row, first_row + len(lengths)))
    return GroupSlice(Prompt(example, "", (0,) * prompt, {}), completions, rows)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 30), min_size=1, max_size=9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
)
def test_every_completion_is_packed_once_within_the_budget(groups: list, budget: int) -> None:
    slices, row = [], 0
    for prompt, lengths in groups:
        slices.append(piece(prompt, lengths, row))
        row += len(lengths)
    batches = pack(slices, budget)
    assert sorted(r for batch in batches for r in batch.rows) == list(range(row))
    for batch in batches:
        # A single completion behind its prompt cannot be cut any further.
        assert batch.num_tokens <= budget or len(batch.rows) == 1
    whole = {r: c for s in slices for r, c in zip(s.rows, s.completions, strict=True)}
    for batch in batches:
        assert [whole[r] for r in batch.rows] == list(batch.completions)


def test_a_packed_row_counts_what_is_fed() -> None:
    # 10 prompt tokens, and of each completion all but the last token: 2 + 0 + 4.
    assert piece(10, [3, 1, 5]).num_tokens == 16
