"""Completions behind images and clips, also with observed tokens and images between their own,
equal plain transformers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from family_policies import backpropagate, build_family_policy, build_prompts
from gpu_standins import use_plain_varlen
from gradients import relative_distance, use_float64, use_float64_recurrence
from tiny_models import clip_examples, make_prompt
from torch import Tensor

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch, Path
from vlm_grpo.model.engine.repeated import extend_prompt
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Observation, Prompt

# Positions on three axes, features inside the tower, recurrent layers, images that see themselves,
# windows, tiles, short convolutions.
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "internvl", "lfm2_vl")
OWN = ((70, 71, 72, 73), (80, 81), (82, 83, 84))


def make_groups(policy: Policy, name: str) -> tuple[GroupSlice, ...]:
    """Build groups whose completions observe two images, one, a text, and nothing."""
    first, second, third, text = build_prompts(policy, name, 4)
    two = Observation(2, first), Observation(3, third)
    observed = two, (), (Observation(1, text),)
    return (
        GroupSlice(first, OWN, (0, 1, 2), observed),
        GroupSlice(text, ((90, 91, 92),), (3,), ((Observation(1, second),),)),
        GroupSlice(third, ((75,), (76, 77)), (4, 5)),
    )


def make_forks(policy: Policy, name: str) -> GroupSlice:
    """Build a group of two trunks that fork, of which one branch observes another image, of one
    that ended in its first turn, and of one that has a single branch left."""
    first, second, third, text = build_prompts(policy, name, 4)
    one, other = Observation(2, second), Observation(1, text)
    completions = (70, 71, 72), (70, 71, 73, 74, 75), (80, 81), (80, 81), (90, 91), (90, 92, 93)
    observed = (one,), (one, Observation(4, third)), (), (), (other,), (other,)
    completions, observed = (*completions, (76, 77)), (*observed, (Observation(1, third),))
    return GroupSlice(first, completions, tuple(range(6, 13)), observed, (0, 0, 2, 2, 4, 4, 6))


def score_plainly(policy: Policy, groups: tuple[GroupSlice, ...]) -> Tensor:
    """Score each completion by a forward pass of the model on it alone, joined by hand."""
    found = []
    for group in groups:
        for number, own in enumerate(group.completions):
            parts: list[tuple[Prompt, tuple[int, ...]]] = [(group.prompt, own)]
            for observation in group.observations[number] if group.observations else ():
                prompt, rest = parts.pop()
                start = observation.start - sum(len(tokens) for _, tokens in parts)
                parts += [(prompt, rest[:start]), (observation.prompt, rest[start:])]
            found.append(score_parts(policy, parts))
    return torch.cat(found)


def score_parts(policy: Policy, parts: list[tuple[Prompt, tuple[int, ...]]]) -> Tensor:
    tokens, is_own, vision = list[int](), list[bool](), dict[str, list[Tensor]]()
    types = [name for prompt, _ in parts for name in prompt.vision if name.endswith("type_ids")]
    for prompt, own in parts:
        tokens += [*prompt.token_ids, *own]
        is_own += [False] * len(prompt.token_ids) + [True] * len(own)
        for name, values in prompt.vision.items():
            if name not in types:
                vision.setdefault(name, []).append(values)
        for name in set(types):
            none = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
            vision.setdefault(name, []).append(prompt.vision.get(name, none))
            vision[name].append(torch.zeros(1, len(own), dtype=torch.int64))
    inputs = {n: torch.cat(values, dim=int(n in types)) for n, values in vision.items()}
    row = torch.tensor([tokens])
    logits = policy.model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits
    predicted = logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    return predicted[torch.tensor(is_own[1:])]


def run(policy: Policy, score: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return scores, and the gradient of a weighted sum of them."""
    return score.detach(), backpropagate(policy, score)


@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_plain_transformers(name, monkeypatch):
    full = {"dtype": "float32"}
    build = partial(build_family_policy, name, torch.float64, policy=full, banned=())
    policies = [build(shared=shared) for shared in (False, True, True)]
    use_float64(monkeypatch, *(policy.model for policy in policies))
    plain, merged, in_one = policies
    groups = (*make_groups(plain, name), make_forks(plain, name))
    for example in clip_examples() if plain.family.takes_videos else []:
        groups += (GroupSlice(make_prompt(plain, example), OWN, (20, 21, 22)),)
    expected, expected_gradient = run(plain, score_plainly(plain, groups))
    results = [run(policy, policy.score(MicroBatch(groups)).logprobs) for policy in (plain, merged)]
    use_plain_varlen(monkeypatch)
    results.append(run(in_one, in_one.score(MicroBatch(groups)).logprobs))
    for scores, gradient in results:
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-11)
        assert relative_distance(gradient, expected_gradient) < 1e-10


@pytest.mark.parametrize("name", ["idefics3", "llava_onevision", "mistral3"])
def test_images_of_other_sizes_are_filled_as_by_the_processor(name):
    build = partial(build_family_policy, name, torch.float64, banned=())
    plain, merged = build(), build(shared=True)
    groups = MicroBatch(make_groups(plain, name))
    with torch.no_grad():  # one encodes each observation by itself, the other all of a path
        scores = [policy.score(groups).logprobs for policy in (plain, merged)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mllama", "paligemma"])
def test_models_that_read_images_only_before_their_own_texts_are_refused(name):
    prompts = build_family_policy(name).prompts
    with pytest.raises(UserError, match=r"environment: the model reads images only before its own"):
        prompts.describe_tools((), ("<tool_call>", "</tool_call>"))


@pytest.mark.parametrize("name", NAMES)
def test_sampling_goes_on_behind_observations_with_one_pass_over_the_prompt(name, monkeypatch):
    policy = build_family_policy(name, torch.float64, shared=True, banned=())
    use_float64_recurrence(monkeypatch, policy.model)
    group, other, _ = make_groups(policy, name)
    # The first two texts of a group have been answered, and one of another prompt.
    begun: list[Any] = [(group.prompt, (70, 71), group.observations[0][:1])]
    begun.append((group.prompt, (82,), group.observations[2]))
    begun.append((other.prompt, (90,), other.observations[0]))
    prompts = [extend_prompt(p, Path(own, observed)) for p, own, observed in begun]
    lengths = [len(own) for _, own, _ in begun]
    sampling = SamplingSettings(policy.distribution, 8)
    groups = policy.sample(prompts, sampling, 1, [(0, i) for i in range(3)], begun=lengths)
    # Two of them begin with the same prompt.
    tokens = sum(len(prompt.token_ids) for prompt in prompts) - len(group.prompt.token_ids)
    assert policy.counters.prefill_tokens == tokens
    for (prompt, before, observed), (completion,) in zip(begun, groups, strict=True):
        assert len(completion.token_ids) == 8 - len(before)
        piece = GroupSlice(prompt, ((*before, *completion.token_ids),), (0,), (observed,))
        scored = score_plainly(policy, (piece,))[len(before) :].detach()
        sampled = torch.tensor(completion.logprobs).double()
        # Norms and rotations are float32.
        torch.testing.assert_close(scored, sampled, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_the_minimum_length_counts_the_tokens_of_earlier_turns(shared):
    policy = build_family_policy("qwen2_5_vl", torch.float64, shared=shared, banned=())
    first, *_ = build_prompts(policy, "qwen2_5_vl", 4)
    prompts = [extend_prompt(first, Path((70,) * count, (Observation(count, first),)))
               for count in (2, 1)]  # fmt: skip
    vocabulary = policy.model.config.get_text_config().vocab_size
    ends = tuple(token for token in range(vocabulary) if token != 70)  # all others end an episode
    ending = replace(policy.distribution, eos=ends, min_new_tokens=2)
    sampling, seeds = SamplingSettings(ending, 8), [(0, 0), (0, 1)]
    groups = policy.sample(prompts, sampling, 3, seeds, begun=[2, 1])
    # The first episode may end at once, the second after another token, which must be 70.
    assert [[len(c.token_ids) for c in group] for group in groups] == [[1] * 3, [2] * 3]


def test_a_trunk_is_passed_once():
    policy = build_family_policy("qwen2_5_vl", torch.float64, shared=True, banned=())
    forks = make_forks(policy, "qwen2_5_vl")
    _, second, _, text = build_prompts(policy, "qwen2_5_vl", 4)
    # The second branch of each trunk: its sampled tokens with what it observed, and an answer.
    saved = 2 + len(second.token_ids) + 1 + (1 + len(text.token_ids))
    assert forks.num_tokens == replace(forks, trunks=()).num_tokens - saved
    assert forks.select(slice(1, 4)).num_tokens == forks.select(slice(1, 3)).num_tokens
    policy.score(MicroBatch((forks,)))
    assert policy.counters.update_tokens == forks.num_tokens
