"""Policies of the small random models of every family, and their comparison with transformers."""

from __future__ import annotations

from typing import Any

import torch
from family_models import BUILDERS
from gradients import relative_distance
from tiny_models import make_prompt, noise_example, tiny_model, wrap_model
from torch import Tensor

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.families import load_family
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Prompt


def build_family_model(name: str) -> tuple[Any, Any]:
    return BUILDERS[name]() if name in BUILDERS else tiny_model(name)


def build_family_policy(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = False,
    policy: Any = None,
    **distribution: Any,
) -> Policy:
    """Build a policy of the named family with random weights, trained by settings of ``policy``."""
    torch.manual_seed(0)
    model, processor = build_family_model(name)
    model.to(dtype)
    if dtype == torch.float64:  # which the default computation of experts refuses
        model.set_experts_implementation("eager")
    family, adapters = load_family(model.config), None
    if shared:
        assert family.why_not_shared(model.config) is None
        use_shared_attention(family, model)
    if policy is not None:
        settings = PolicySettings.model_validate(policy)
        enable_gradient_checkpointing(model, settings.gradient_checkpointing)
        adapters = apply_lora_or_freeze(model, settings)
        model.train()
    return wrap_model(model, processor, shared, adapters, **distribution)


def build_prompts(policy: Policy, name: str, count: int) -> list[Prompt]:
    """Build prompts in turn with one image, two of different sizes, another one, and none."""
    sizes = ([(60, 40)], [(33, 90), (64, 64)], [(30, 120)], [])
    if name.startswith("paligemma"):  # refuses prompts without an image
        sizes = sizes[:3]
    questions = ("What is it?", "Where?", "How many are there?")
    return [
        make_prompt(
            policy,
            noise_example(f"{index}", sizes[index % len(sizes)], questions[index % 3], seed=index),
        )
        for index in range(count)
    ]


def score_alone(model: Any, prompt: Prompt, completion: tuple[int, ...]) -> Tensor:
    """Return a completion's log-probabilities by the model's own forward pass on it alone."""
    tokens = torch.tensor([[*prompt.token_ids, *completion]])
    inputs = {}
    for name, values in prompt.vision.items():
        if name.endswith("token_type_ids"):
            is_suffix = name == "token_type_ids" and model.config.model_type == "paligemma"
            values = torch.nn.functional.pad(values, (0, len(completion)), value=int(is_suffix))
        elif name == "cross_attention_mask":  # of Mllama: the completion sees the prompt's images
            values = torch.cat((values, *[values[:, -1:]] * len(completion)), dim=1)
        inputs[name] = values
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits
    predicted = logits[0, -len(completion) - 1 : -1].log_softmax(-1)
    return predicted.gather(1, tokens[0, -len(completion) :, None])[:, 0]


def score_each_alone(model: Any, batch: MicroBatch) -> Tensor:
    alone = [score_alone(model, s.prompt, tokens) for s in batch.slices for tokens in s.completions]
    return torch.cat(alone)


def make_batch(prompts: list[Prompt]) -> MicroBatch:
    groups: Any = [((70, 71, 72, 73), (80, 81)), ((90, 91, 92),), ((75,), (76, 77)), ((78, 79),)]
    slices = tuple(
        GroupSlice(prompt, group, tuple(range(len(group))))
        for prompt, group in zip(prompts, groups, strict=False)
    )
    return MicroBatch(slices)


def compare_with_transformers(name: str) -> tuple[float, float]:
    """Compare a family's shared form with plain forward passes, in float64.

    Return the largest difference of log-probabilities in nats, and the relative difference of the
    gradients of a weighted sum of them.
    """
    logprobs: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for shared in (False, True):
        policy = build_family_policy(
            name, torch.float64, shared=shared, policy={"dtype": "float32"}, banned=()
        )
        batch = make_batch(build_prompts(policy, name, 4))
        scores = policy.score(batch).logprobs if shared else score_each_alone(policy.model, batch)
        (scores * torch.linspace(-1, 1, len(scores), dtype=scores.dtype)).sum().backward()
        weights = policy.trainable_parameters()
        gradients.append({n: w.grad for n, w in weights if w.grad is not None and w.grad.any()})
        logprobs.append(scores.detach())
    plain, shared_form = gradients
    largest = float((logprobs[1] - logprobs[0]).abs().max())
    return largest, relative_distance(shared_form, plain)
