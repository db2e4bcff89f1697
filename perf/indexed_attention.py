"""Measure whether layers of ``indexed_attention`` (Qwen4-Exp) could share a prompt.

Run ``python perf/indexed_attention.py``. In each of these layers an indexer scores blocks of
consecutive visible tokens. A token attends to the best blocks and to the tokens after the last
whole block. Weights and recurrences are in float64.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import pytest
import torch
from family_models import BUILDERS
from gradients import use_float64_recurrence
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.qwen4_exp import modeling_qwen4_exp

from vlm_grpo.model.engine.attention import PackedAttention, use_shared_attention
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.families.known import load_family

PROMPT, LENGTHS = 46, (30, 17, 23)
"""Tokens of the prompt, no whole number of blocks of 4, and of each completion."""


def attend_masked(module: nn.Module, *args: Any, attend: Any = None, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, *args, **kwargs)


def build_mask(is_packed: bool) -> Tensor:
    """Return which tokens of the row see which earlier ones: all, or their own sequence's."""
    total = PROMPT + sum(LENGTHS)
    owner = torch.tensor([-1] * PROMPT + [i for i, n in enumerate(LENGTHS) for _ in range(n)])
    same = (owner[:, None] == owner) | (owner == -1)
    mask = torch.ones(total, total).tril().bool()
    return (mask & same if is_packed else mask)[None, None]


def read_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]


@torch.no_grad()
def measure(patch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = BUILDERS["qwen4_exp"]()[0].double()
    model.set_experts_implementation("eager")
    use_float64_recurrence(patch, model)
    language, family = model.model.language_model, load_family(model.config)
    AttentionInterface.register("masked", attend_masked)
    AttentionMaskInterface.register("masked", sdpa_mask)
    chosen: list[Tensor] = []
    seconds: list[float] = []
    kind: Any = modeling_qwen4_exp.Qwen4ExpTextQSAIndexer
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(lambda *_: seconds.append(time.process_time()))
            module.register_forward_hook(lambda _m, _a, output: chosen.append(output[0, 0]))
            module.register_forward_hook(lambda *_: seconds.append(time.process_time()))
    tokens = torch.randint(5, 250, (PROMPT + sum(LENGTHS),))
    own = tokens[PROMPT:].split(LENGTHS)
    alone, alone_chosen = [], []
    for completion in own:
        inputs = torch.cat([tokens[:PROMPT], completion])[None]
        chosen.clear()
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0]
        alone.append(read_logprobs(logits[PROMPT - 1 : -1], completion))
        alone_chosen.append([mask[PROMPT:] for mask in chosen])
    use_shared_attention(family, model)
    language.config._attn_implementation = "masked"  # noqa: SLF001
    span = GroupSpan(0, PROMPT, LENGTHS)
    counted = [torch.arange(PROMPT), *(PROMPT + torch.arange(n) for n in LENGTHS)]
    positions = torch.cat(counted).expand(3, 1, -1)
    embeds = model.get_input_embeddings()(tokens[None])
    for is_packed in (False, True):
        chosen.clear()
        seconds.clear()
        hidden = language(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=build_mask(is_packed),
            attend=PackedAttention([span]),
            use_cache=False,
        ).last_hidden_state[0]
        logits, start, worst, differ, total = model.lm_head(hidden), PROMPT, 0.0, 0, 0
        for index, completion in enumerate(own):
            stop = start + len(completion)
            predictors = [PROMPT - 1, *range(start, stop - 1)]
            found = read_logprobs(logits[predictors], completion)
            worst = max(worst, float((found - alone[index]).abs().max()))
            for row, expected in zip(chosen, alone_chosen[index], strict=True):
                seen = torch.cat([row[start:stop, :PROMPT], row[start:stop, start:stop]], dim=1)
                differ += int((seen != expected).any(1).sum())
                total += len(seen)
            start = stop
        name = "the mask of its own sequence" if is_packed else "a causal mask over the row"
        print(f"{name}: log-probs differ by {worst:.0e}, the choice at {differ} of {total} places")
    spent = sum(seconds[1::2]) - sum(seconds[::2])
    per_token = 1000 * spent / (len(chosen) * len(tokens))
    print(f"the indexer takes {per_token:.1f} ms of a processor per token and layer")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        measure(patch)
