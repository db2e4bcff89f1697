"""Policies of the small random models of every family, and their comparison with transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from family_models import BUILDERS
from gradients import relative_distance
from tiny_models import (
    make_builder,
    make_prompt,
    noise_example,
    pack_tokens,
    tiny_model,
    wrap_model,
)
from torch import Tensor

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.model.engine.sampling import build_sampling_distribution
from vlm_grpo.model.families.family import ImageFeatures, place
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.types import Prompt

POLICIES: dict[str, dict[str, Any]] = {
    "lora-float32": {"dtype": "float32", "lora": {"r": 4, "alpha": 8}},
    "lora-bfloat16": {"dtype": "bfloat16", "lora": {"r": 4, "alpha": 8}},
    "full-float32": {"dtype": "float32"},
    "full-bfloat16": {"dtype": "bfloat16"},
    "full-no-masters": {"dtype": "bfloat16", "master_weights": "bfloat16"},
}


def build_policy(name: str, values: dict[str, Any], **depths: int) -> tuple[Policy, PolicySettings]:
    """Build a tiny policy as ``load_model`` does, with the given numbers of layers."""
    settings = PolicySettings.model_validate(values)
    dtype = torch.bfloat16 if values.get("lora") and values["dtype"] == "bfloat16" else None
    if settings.master_weights == "bfloat16":
        dtype = torch.bfloat16
    own: Any = (
        {"depth": depths["vision"], "fullatt_block_indexes": [0]} if "vision" in depths else {}
    )
    layers = depths.get("text", 3)
    model, processor = tiny_model(name, dtype or torch.float32, layers=layers, **own)
    model_family = load_family(model.config)
    adapters = apply_lora_or_freeze(model, settings)
    use_shared_attention(model_family, model)
    autocast = dtype is None and values["dtype"] == "bfloat16"
    loaded = LoadedModel(model, make_builder(model, processor), True, adapters, autocast)
    rollout = load_settings("counting").rollout
    distribution = build_sampling_distribution(model, processor, model_family, rollout)
    return Policy(loaded, distribution), settings


def move_to_meta(monkeypatch: pytest.MonkeyPatch, policy: Policy, prompt: Prompt) -> None:
    """Move the model and the prompt's features to the device with the shapes of a GPU's kernels."""
    engine: Any = policy.engine
    (prefix,) = engine.build_prefixes([prompt], policy.counters)
    features = tuple(ImageFeatures(f.embeds.to("meta")) for f in prefix.features)
    prefix = replace(prefix, features=features)
    monkeypatch.setattr(engine, "encoder", lambda *_: {})
    monkeypatch.setattr(engine, "_build_prefix", lambda *_: prefix)
    policy.model.to("meta")


def build_prompt(policy: Policy, side: int = 112) -> Prompt:
    return make_prompt(policy, noise_example("a", [(side, side)]))


def build_batch(prompt: Prompt, group: int = 3, length: int = 5) -> MicroBatch:
    return pack_tokens([prompt], [[tuple(range(70, 70 + length))] * group])


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
        assert why_not_shared(family, model.config) is None
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
    prompts = []
    for index in range(count):
        own, question = sizes[index % len(sizes)], questions[index % 3]
        prompts.append(make_prompt(policy, noise_example(f"{index}", own, question, seed=index)))
    return prompts


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
    inputs = place(model, inputs)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits
    predicted = logits[0, -len(completion) - 1 : -1].log_softmax(-1)
    return predicted.gather(1, tokens[0, -len(completion) :, None])[:, 0]


def score_each_alone(model: Any, batch: MicroBatch) -> Tensor:
    alone = [score_alone(model, s.prompt, tokens) for s in batch.slices for tokens in s.completions]
    return torch.cat(alone)


def make_batch(prompts: list[Prompt]) -> MicroBatch:
    groups: Any = [((70, 71, 72, 73), (80, 81)), ((90, 91, 92),), ((75,), (76, 77)), ((78, 79),)]
    return pack_tokens(prompts, groups[: len(prompts)])


def backpropagate(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a weighted sum of log-probs, of the weights where it is not 0."""
    policy.model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return {name: grad for name, grad in read_gradient(policy).items() if grad.any()}


def read_gradient(policy: Policy) -> dict[str, Tensor]:
    weights = policy.trainable_parameters()
    return {name: w.grad.clone() for name, w in weights if w.grad is not None}


def compare_with_transformers(name: str) -> tuple[float, float]:
    """Compare a family's shared form with plain forward passes in float64; return the largest
    difference of log-probs in nats, and the relative one of the gradients of a weighted sum."""
    logprobs: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for shared in (False, True):
        full = {"dtype": "float32"}
        policy = build_family_policy(name, torch.float64, shared=shared, policy=full, banned=())
        batch = make_batch(build_prompts(policy, name, 4))
        scores = policy.score(batch).logprobs if shared else score_each_alone(policy.model, batch)
        gradients.append(backpropagate(policy, scores))
        logprobs.append(scores.detach())
    plain, shared_form = gradients
    largest = float((logprobs[1] - logprobs[0]).abs().max())
    return largest, relative_distance(shared_form, plain)
