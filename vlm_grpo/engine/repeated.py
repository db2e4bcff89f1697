"""Sampling and scoring with the prompt and its images repeated for every completion.

This form uses only the model's ``forward`` and ``generate``, so it works with every image-text
model, and tests compare the shared form with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.engine.logprobs import TokenScores, score_logits
from vlm_grpo.engine.sampling import SamplerState, SamplingDistribution
from vlm_grpo.types import Prompt


def _inputs(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[int]], pad: int, device: torch.device
) -> dict[str, Tensor]:
    """Build model inputs, one row per completion: prompt padded left, completion padded right."""
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    longest = max(len(tokens) for tokens in completions)
    tokens, mask = [], []
    columns: dict[str, list[Tensor]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = longest_prompt - len(prompt.token_ids), longest - len(completion)
        tokens.append([pad] * left + [*prompt.token_ids, *completion] + [pad] * right)
        mask.append([0] * left + [1] * (len(prompt.token_ids) + len(completion)) + [0] * right)
        for name, values in prompt.vision.items():
            if values.shape[:2] == (1, len(prompt.token_ids)):  # one value per token
                values = torch.nn.functional.pad(values, (left, len(completion) + right))
            columns.setdefault(name, []).append(values)
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
    inputs |= {name: _concatenate(values) for name, values in columns.items()}
    return {name: values.to(device) for name, values in inputs.items()}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, after padding the others with zeros on the right.

    Processors that pad the images of a batch to one size or number do it this way.
    """
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *sizes)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined


def score_repeated(
    model: Any,
    batch: MicroBatch,
    distribution: SamplingDistribution,
    pad: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Score a micro-batch's completion tokens, one row per completion."""
    prompts = [piece.prompt for piece in batch.slices for _ in piece.rows]
    completions = batch.completions
    device = next(model.parameters()).device
    longest = max(len(tokens) for tokens in completions)
    inputs = _inputs(prompts, [tokens[:-1] for tokens in completions], pad, device)
    logits = model(**inputs, use_cache=False, logits_to_keep=longest).logits
    lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
    steps = torch.arange(longest, device=device)
    real = steps < lengths[:, None]
    targets = torch.tensor([token for tokens in completions for token in tokens], device=device)
    return score_logits(
        logits[real], targets, steps.expand_as(real)[real], distribution, with_entropy
    )


class _SampleToken(LogitsProcessor):
    """A processor that samples each row's token and makes ``generate`` choose it."""

    def __init__(self, state: SamplerState, rows: Tensor, pad: int) -> None:
        self.state, self.rows, self.pad = state, rows, pad

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        is_active = self.state.active[self.rows]
        chosen = self.state.sample(scores, self.rows).where(is_active, self.pad)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class _IsFinished(StoppingCriteria):
    """A criterion that stops the rows whose completions are finished."""

    def __init__(self, state: SamplerState, rows: Tensor) -> None:
        self.state, self.rows = state, rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.state.update_active()
        return ~self.state.active[self.rows]


def sample_repeated(
    model: Any, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, pad: int
) -> None:
    """Sample all completions; rows p·G … p·G+G−1 of ``state`` belong to prompt p.

    Args:
        model: the bare transformers model.
        prompts: one prompt per group.
        state: receives the tokens.
        max_tokens: maximum number of prompt and completion tokens processed at once.
        pad: id of the padding token.
    """
    # The model's generation config may add a repetition penalty or suppress tokens, which are not
    # part of the scored distribution.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        _sample(model, prompts, state, max_tokens, pad)
    finally:
        model.generation_config = own


def _sample(
    model: Any, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, pad: int
) -> None:
    group = state.count // len(prompts)
    longest = state.tokens.shape[1]
    device = state.tokens.device
    order = sorted(range(state.count), key=lambda r: -len(prompts[r // group].token_ids))
    while order:
        count = max(1, max_tokens // (len(prompts[order[0] // group].token_ids) + longest))
        rows, order = order[:count], order[count:]
        chunk = torch.tensor(rows, device=device)
        config = GenerationConfig(
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=list(state.settings.distribution.eos) or None,
        )
        model.generate(
            **_inputs([prompts[r // group] for r in rows], [()] * len(rows), pad, device),
            generation_config=config,
            logits_processor=LogitsProcessorList([_SampleToken(state, chunk, pad)]),
            stopping_criteria=StoppingCriteriaList([_IsFinished(state, chunk)]),
        )
