"""The plain form: the prompt and its images repeated for every completion.

It uses nothing but the model's own ``forward`` and ``generate``, so it serves every image-text
model, and it is what the shared form is compared with.
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
    """Model inputs, one row a completion: prompts padded on the left, completions on the right."""
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    longest = max(len(tokens) for tokens in completions)
    tokens, mask = [], []
    columns: dict[str, list[Tensor]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = longest_prompt - len(prompt.token_ids), longest - len(completion)
        tokens.append([pad] * left + [*prompt.token_ids, *completion] + [pad] * right)
        mask.append([0] * left + [1] * (len(prompt.token_ids) + len(completion)) + [0] * right)
        for name, values in prompt.vision.items():
            if values.shape[:2] == (1, len(prompt.token_ids)):  # one value a token
                values = torch.nn.functional.pad(values, (left, len(completion) + right))
            columns.setdefault(name, []).append(values)
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
    inputs |= {name: torch.cat(values) for name, values in columns.items()}
    return {name: values.to(device) for name, values in inputs.items()}


def score_repeated(
    model: Any,
    batch: MicroBatch,
    distribution: SamplingDistribution,
    pad: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Log-probabilities of a micro-batch's completion tokens, one row a completion."""
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


class _TakeOne(LogitsProcessor):
    """Draws each row's token itself and leaves ``generate`` only that token to choose."""

    def __init__(self, draws: SamplerState, rows: Tensor, pad: int) -> None:
        self.draws, self.rows, self.pad = draws, rows, pad

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        active = self.draws.active[self.rows]
        chosen = torch.full_like(self.rows, self.pad)
        chosen[active] = self.draws.sample(scores[active], self.rows[active])
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Stops the rows whose completions are done."""

    def __init__(self, draws: SamplerState, rows: Tensor) -> None:
        self.draws, self.rows = draws, rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return ~self.draws.active[self.rows]


def sample_repeated(
    model: Any, prompts: Sequence[Prompt], draws: SamplerState, max_tokens: int, pad: int
) -> None:
    """Draw all completions, the G of prompt p at rows p·G … p·G+G−1 of ``draws``.

    Args:
        max_tokens: the most tokens of prompts and completions generated at once.
    """
    # What the model's own configuration would add (a repetition penalty, suppressed tokens) is no
    # part of the distribution that is scored.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        _sample(model, prompts, draws, max_tokens, pad)
    finally:
        model.generation_config = own


def _sample(
    model: Any, prompts: Sequence[Prompt], draws: SamplerState, max_tokens: int, pad: int
) -> None:
    group = len(draws.lengths) // len(prompts)
    longest = draws.tokens.shape[1]
    device = draws.tokens.device
    order = sorted(range(len(draws.lengths)), key=lambda r: -len(prompts[r // group].token_ids))
    while order:
        count = max(1, max_tokens // (len(prompts[order[0] // group].token_ids) + longest))
        rows, order = order[:count], order[count:]
        chunk = torch.tensor(rows, device=device)
        config = GenerationConfig(
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=list(draws.settings.distribution.eos) or None,
        )
        model.generate(
            **_inputs([prompts[r // group] for r in rows], [()] * len(rows), pad, device),
            generation_config=config,
            logits_processor=LogitsProcessorList([_TakeOne(draws, chunk, pad)]),
            stopping_criteria=StoppingCriteriaList([_Ended(draws, chunk)]),
        )
