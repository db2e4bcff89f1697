"""Sampling and scoring with the prompt and its images repeated for every completion.

This form uses only the model's ``forward`` and ``generate``, so it works with every image-text
model, and tests compare the shared form with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores, score_logits
from vlm_grpo.model.engine.sampling import SamplerState
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import Prompt


class Padding(NamedTuple):
    """What is appended to rows."""

    token: int
    token_type: int | None
    """That of completions; None: that of the prompt's last token."""


def _build_inputs(
    model: Any, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]], padding: Padding
) -> dict[str, Tensor]:
    """Build model inputs, one row per completion: prompt padded left, completion padded right."""
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    longest = max(len(tokens) for tokens in completions)
    pad, kind = padding
    tokens, mask = [], []
    columns: dict[str, list[Tensor]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = longest_prompt - len(prompt.token_ids), longest - len(completion)
        tokens.append([pad] * left + [*prompt.token_ids, *completion] + [pad] * right)
        mask.append([0] * left + [1] * (len(prompt.token_ids) + len(completion)) + [0] * right)
        for name, values in prompt.vision.items():
            if _is_per_token(name, values, prompt):
                last = values[:, -1:]
                before = torch.zeros_like(last).repeat_interleave(left, 1)
                after = last if kind is None else torch.full_like(last, kind)
                values = torch.cat((before, values, after.repeat_interleave(longest, 1)), dim=1)
            columns.setdefault(name, []).append(values)
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
    inputs |= {name: torch.cat(values) for name, values in columns.items()}
    device = next(model.parameters()).device
    return {name: copy_to(device, values) for name, values in inputs.items()}


def _is_per_token(name: str, values: Tensor, prompt: Prompt) -> bool:
    # An image can have as many patches as its prompt has tokens.
    return values.shape[:2] == (1, len(prompt.token_ids)) and not name.startswith(
        ("pixel", "image")
    )


def score_repeated(
    model: Any, batch: MicroBatch, settings: ScoringSettings, padding: Padding
) -> TokenScores:
    """Score a micro-batch's completion tokens, one row per completion and one pass per prompt."""
    # Prompts together would need padded images, for which not every model has a mask, and padding
    # on the left, which shifts the positions of many.
    return TokenScores.join([_score(model, piece, settings, padding) for piece in batch.slices])


def _score(
    model: Any, piece: GroupSlice, settings: ScoringSettings, padding: Padding
) -> TokenScores:
    completions = piece.completions
    prompts = [piece.prompt] * len(completions)
    inputs = _build_inputs(model, prompts, [tokens[:-1] for tokens in completions], padding)
    device = inputs["input_ids"].device
    longest = max(len(tokens) for tokens in completions)
    logits = model(**inputs, use_cache=False, logits_to_keep=longest).logits
    lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
    steps = torch.arange(longest, device=device)
    real = steps < lengths[:, None]
    targets = torch.tensor([token for tokens in completions for token in tokens], device=device)
    return score_logits(logits[real], targets, steps.expand_as(real)[real], settings)


class _SampleToken(LogitsProcessor):
    """Samples each row's token and makes ``generate`` choose it."""

    def __init__(self, state: SamplerState, rows: Tensor, pad: int) -> None:
        self.state, self.rows, self.pad = state, rows, pad

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        is_active = self.state.active[self.rows]
        chosen = self.state.sample(scores, self.rows).where(is_active, self.pad)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class _IsFinished(StoppingCriteria):
    """Stops the rows whose completions are finished."""

    def __init__(self, state: SamplerState, rows: Tensor) -> None:
        self.state, self.rows = state, rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.state.update_active()
        return ~self.state.active[self.rows]


def _group_alike(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Group the indices of prompts whose images fit into one batch without padding."""
    # Not every model has a mask for padded pixels, and some refuse a prompt of text alone beside
    # prompts with images.
    groups: dict[object, list[int]] = {}
    for index, prompt in enumerate(prompts):
        shapes = {
            name: () if _is_per_token(name, values, prompt) else values.shape[1:]
            for name, values in prompt.vision.items()
        }
        groups.setdefault(tuple(shapes.items()), []).append(index)
    return list(groups.values())


def sample_repeated(
    model: Any, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, padding: Padding
) -> None:
    """Sample all completions of the prompts into ``state``, with at most ``max_tokens`` prompt and
    completion tokens processed at once."""
    longest = state.tokens.shape[1]
    config = GenerationConfig(
        max_new_tokens=longest,
        do_sample=False,
        pad_token_id=padding.token,
        eos_token_id=list(state.settings.distribution.eos) or None,
    )
    pairs = zip(prompts, state.sizes, strict=True)
    repeated = [prompt for prompt, size in pairs for _ in range(size)]
    # The model's generation config may add a repetition penalty or suppress tokens, which are not
    # part of the scored distribution.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        for order in _group_alike(repeated):
            order.sort(key=lambda row: -len(repeated[row].token_ids))
            while order:
                count = max(1, max_tokens // (len(repeated[order[0]].token_ids) + longest))
                rows, order = order[:count], order[count:]
                inputs = _build_inputs(
                    model, [repeated[r] for r in rows], [()] * len(rows), padding
                )
                chunk = torch.tensor(rows, device=state.tokens.device)
                sampler = _SampleToken(state, chunk, padding.token)
                model.generate(
                    **inputs,
                    generation_config=config,
                    logits_processor=LogitsProcessorList([sampler]),
                    stopping_criteria=StoppingCriteriaList([_IsFinished(state, chunk)]),
                )
    finally:
        model.generation_config = own
