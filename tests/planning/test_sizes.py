"""Tests of the workload against the micro-batches of the update."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import noise_example, tiny_model

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.engine.packing import GroupSlice, pack
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.planner import with_changes
from vlm_grpo.planning.sizes import PromptSize, Workload, estimate_workload
from vlm_grpo.types import Observation, Prompt


@settings(max_examples=60)
@given(
    prompts=st.integers(1, 9),
    group=st.integers(2, 12),
    prompt=st.integers(1, 200),
    completion=st.integers(1, 40),
    budget=st.integers(1, 900),
    results=st.integers(0, 2),
)
def test_micro_batches_match_the_update(prompts, group, prompt, completion, budget, results):
    results = min(results, completion - 1)
    work = Workload(prompts, group, prompt, 0, completion, 1 << 16, budget, 0)
    work = replace(work, results=results, result_tokens=7)
    seen = Prompt(noise_example("b", []), "", (0,) * 7, {})
    observed = (tuple(Observation(n + 1, seen) for n in range(results)),) * group
    own = Prompt(noise_example("a", []), "", (0,) * prompt, {})
    rows, tokens = tuple(range(group)), ((1,) * completion,) * group
    piece = GroupSlice(own, tokens, rows, observed if results else ())
    batches = pack([piece] * prompts, budget)
    assert work.micro_tokens == max(batch.num_tokens for batch in batches)
    assert work.num_micro_batches == len(batches)
    assert work.update_tokens == sum(batch.num_tokens for batch in batches)
    largest = max(sum(map(len, batch.completions)) for batch in batches)
    assert work.micro_completion_tokens == largest
    largest = max(sum(len(piece.prompt.token_ids) for piece in batch.slices) for batch in batches)
    assert work.micro_rows[1] == largest


def test_prompts_are_divided_among_devices_and_the_repeated_form_has_one_per_completion():
    config = tiny_model("qwen2_vl")[0].config
    shared, repeated = (
        read_model_shape(config, PolicySettings(engine=name)) for name in ("shared", "repeated")
    )
    settings, size = load_settings("counting"), PromptSize(40, 36, 0, 0)
    for devices, prompts in ((1, 32), (4, 8), (5, 7)):
        assert estimate_workload(settings, size, shared, devices).num_prompts == prompts
    sizes = ["optim.prompts_per_step=4", "optim.max_tokens_per_batch=70"]
    settings = load_settings("counting", [*sizes, "rollout.num_generations=6"])
    settings = with_changes(settings, "rollout", max_completion_length=5, max_tokens_per_batch=100)
    work = estimate_workload(settings, PromptSize(20, 4, 0, 0), repeated)
    assert (work.num_groups, work.num_prompts, work.num_generations) == (4, 24, 1)
    assert work.concurrent_prompts == 4  # rows of 20 + 5 tokens in 100
    # As in the update: 70 tokens hold one group of 20 + 6 · 4 packed tokens, or six rows of 24.
    assert (work.num_micro_batches, work.micro_tokens, work.update_tokens) == (4, 6 * 24, 24 * 24)
    assert (work.micro_rows[1], work.micro_completion_tokens) == (6 * 20, 6 * 5)
    assert work.head_chunk_tokens == 0  # ``score_repeated`` computes all logits at once
