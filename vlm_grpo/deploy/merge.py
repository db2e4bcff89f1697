"""Merging adapters that were trained on weights in 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_run_task, load_split
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.linear import is_quantized, restore
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.training.targets import TargetWriter, write_groups

PROMPTS = 16
"""Number of training examples whose gold answers are scored."""


@dataclass(frozen=True)
class Merge:
    """An adapter merged into other weights than those it was trained on.

    Attributes:
        dequantized: whether these are the quantized weights, dequantized; or the original ones.
        tokens: number of tokens of gold answers that the trained policy and the merged model
            scored; 0: the examples are gone, or have no gold answers that can be written.
        mean, largest: absolute difference of their log-probs, in nats.
    """

    dequantized: bool
    tokens: int = 0
    mean: float = 0.0
    largest: float = 0.0


@torch.no_grad()
def replace_with_dequantized(model: Any, quantized: Any) -> None:
    """Replace a model's weights, under its adapters, with those of its quantized form."""
    for name, layer in quantized.named_modules():
        if is_quantized(layer):
            whole = model.get_submodule(name)
            weight = getattr(whole, "base_layer", whole).weight
            weight.copy_(restore(layer.weight, quantized.dtype))


@torch.no_grad()
def measure_merge(
    settings: Settings, checkpoint: Path | None, merged: LoadedModel, dequantized: bool
) -> Merge:
    """Compare the log-probs of gold answers under the trained policy and the merged model.

    Args:
        settings: settings of the run.
        checkpoint: folder of the trained adapter.
        merged: the merged model.
        dequantized: whether it has the dequantized weights.
    """
    policy = load_policy(settings, checkpoint, training=False)
    try:
        task = policy.prompts.adapt(load_run_task(settings))
        examples = load_split(settings, task, "train")[:PROMPTS]
        prompts = [
            policy.prompts.build(policy.prompts.with_resized_sizes(e), task) for e in examples
        ]
        groups = write_groups(prompts, TargetWriter(policy, settings), task)
    except UserError:
        return Merge(dequantized)
    answers = [tuple(completion.token_ids for completion in group.completions) for group in groups]
    slices = (
        GroupSlice(group.prompt, tokens, tuple(range(len(tokens))))
        for group, tokens in zip(groups, answers, strict=True)
    )
    batch = MicroBatch(tuple(slices))
    before, after = (
        scorer.score(batch, supervised=True).logprobs.float().cpu()
        for scorer in (policy, Policy(merged, policy.distribution))
    )
    difference = (after - before).abs()
    return Merge(dequantized, len(difference), float(difference.mean()), float(difference.max()))
