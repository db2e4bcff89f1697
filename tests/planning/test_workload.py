"""Tests of the workload against the micro-batches of the update."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import noise_example

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.engine.batch import GroupSlice, pack
from vlm_grpo.planning.workload import Workload, estimate_workload
from vlm_grpo.types import Prompt


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 9),
    group=st.integers(2, 12),
    prompt=st.integers(1, 200),
    completion=st.integers(1, 40),
    budget=st.integers(1, 900),
)
def test_micro_batches_match_the_update(
    prompts: int, group: int, prompt: int, completion: int, budget: int
) -> None:
    work = Workload(prompts, group, prompt, 0, completion, 1 << 16, budget, 0)
    example_prompt = Prompt(noise_example("a", []), "", (0,) * prompt, {})
    slices = [
        GroupSlice(example_prompt, ((1,) * completion,) * group, tuple(range(group)))
        for _ in range(prompts)
    ]
    batches = pack(slices, budget)
    assert work.micro_tokens == max(batch.num_tokens for batch in batches)
    assert work.num_micro_batches == len(batches)
    assert work.update_tokens == sum(batch.num_tokens for batch in batches)
    largest = max(sum(map(len, batch.completions)) for batch in batches)
    assert work.micro_completion_tokens == largest
    largest = max(sum(len(piece.prompt.token_ids) for piece in batch.slices) for batch in batches)
    assert work.micro_prompt_tokens == largest


def test_prompts_are_divided_among_devices() -> None:
    settings = load_settings("counting")
    assert [estimate_workload(settings, 40, 36, 0, n).num_prompts for n in (1, 4, 5)] == [32, 8, 7]
