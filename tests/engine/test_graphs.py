"""A decoding step that is recorded once and replayed samples what the plain loop samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import FAMILIES, noise_example, tiny_policy
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from vlm_grpo.config.policy import RolloutSettings
from vlm_grpo.distributed.fsdp import FSDP
from vlm_grpo.engine import decode
from vlm_grpo.engine.graphs import CudaGraph, DecodeStep, get_capture
from vlm_grpo.engine.sampling import SamplingSettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Prompt

SIZES: list[list[tuple[int, int]]] = [[], [(56, 56)], [(84, 56), (56, 56)], [(112, 84)], []]


class Plain(Task):
    """Asks the example's question as it stands."""


def prompts_of(policy: Policy) -> list[Prompt]:
    examples = [noise_example(str(n), sizes, "What? " * n, seed=n) for n, sizes in enumerate(SIZES)]
    return [
        policy.build_prompt(policy.with_resized_sizes(example), Plain()) for example in examples
    ]


def sampled(policy: Policy, max_tokens: int = 100_000) -> list[tuple[Completion, ...]]:
    prompts = prompts_of(policy)
    settings = SamplingSettings(policy.distribution, 12)
    seeds = [(0, index) for index in range(len(prompts))]
    return policy.sample(prompts, settings, 3, seeds, max_tokens)


class Recording:
    """The operations of one step on their very tensors, as a CUDA graph holds them.

    What is recorded runs without the step's Python, so a step that depended on values in Python
    would go wrong, and one that read them from the device raises while it is recorded.
    """

    made = 0

    def __init__(self, step: DecodeStep, inputs: tuple[Tensor, ...]) -> None:
        Recording.made += 1
        step(*inputs)  # as the recording on a GPU does
        self.operations = make_fx(step)(*inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.operations(*inputs)


# 200 tokens: the prompts wait for one another; places by fours: several recordings a rollout.
@pytest.mark.parametrize("max_tokens", [100_000, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_samples_the_same(
    family: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LENGTH_BUCKET", 4)
    # The tiny model would hardly ever end a completion: with several tokens that end one, rows
    # finish at different times.
    policy = tiny_policy(family, dtype=torch.float64, eos=tuple(range(70, 110)))
    plain = sampled(policy, max_tokens)
    lengths = {len(c.token_ids) for members in plain for c in members}
    assert len(lengths) > 3
    policy.capture = Recording
    Recording.made = 0
    recorded = sampled(policy, max_tokens)
    assert Recording.made >= 3
    for mine, theirs in zip(recorded, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)


def test_a_step_that_reads_from_the_device_is_not_recorded() -> None:
    def step(tokens: Tensor, positions: Tensor, fed: Tensor) -> Tensor:
        return tokens.float()[:, None] if bool(fed.any()) else positions.float()[:, None]

    ones = torch.ones(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
        Recording(step, (ones, ones, ones))


def test_graphs_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutSettings(cuda_graphs=True)
    assert get_capture(RolloutSettings(), shared=False, training=True) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_capture(rollout, shared=True, training=False) is None
    with pytest.raises(UserError, match="needs a CUDA device"):
        get_capture(rollout, shared=True, training=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_capture(rollout, shared=True, training=True) is CudaGraph
    with pytest.raises(UserError, match="repeats its prompt"):
        get_capture(rollout, shared=False, training=True)
    policy = tiny_policy("qwen2_5_vl")
    policy.capture = Recording
    with pytest.raises(UserError, match="cut over ranks"):
        FSDP(policy, Accelerator(cpu=True), stream=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cuda_graph_samples_the_same(family: str, dtype: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    policy = tiny_policy(family, dtype=dtype)
    policy.model.to("cuda")
    plain = sampled(policy)
    policy.capture = CudaGraph
    recorded = sampled(policy)
    same = [
        a.token_ids == b.token_ids
        for mine, theirs in zip(recorded, plain, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    # Sums over another number of masked places are rounded otherwise.
    assert sum(same) >= 0.8 * len(same)
