"""Packed attention in one call of a kernel for sequences of different lengths.

A prompt is a sequence that attends causally to itself. A completion is a sequence whose keys are
those of its prompt followed by its own; the causal diagonal of the kernel is aligned at the last
query and the last key, so a completion's first token sees the whole prompt and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from vlm_grpo.model.transfer import copy_to


class GroupSpan(NamedTuple):
    """The location in a packed row of one group: a prompt followed by its completions."""

    start: int
    prompt_length: int
    completion_lengths: tuple[int, ...]


def has_varlen(query: Tensor) -> bool:
    """Return whether the kernel runs on the query's device and in its precision."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def _run_kernel(*tensors: Any, **options: Any) -> Any:
    """Call PyTorch's kernel with FlashAttention, so that sampling and scoring use the same one;
    cuDNN's builds a plan for each new shape, and decode steps have many."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(*tensors, **options)


class VarlenPlan:
    """The sequences of a packed row, which the spans cover, and their K keys, on the row's device.

    Empty completions are no sequences. A prompt's keys are repeated for each completion.
    """

    def __init__(self, spans: Sequence[GroupSpan], device: torch.device) -> None:
        lengths = [(0, 0)]
        keys: list[np.ndarray] = []
        for start, prompt_length, completion_lengths in spans:
            prompt = np.arange(start, start + prompt_length)
            lengths.append((prompt_length, prompt_length))
            keys.append(prompt)
            start += prompt_length
            for length in filter(None, completion_lengths):
                lengths.append((length, prompt_length + length))
                keys += [prompt, np.arange(start, start + length)]
                start += length
        query_lengths, key_lengths = np.array(lengths, dtype=np.int32).T
        # The index in the row of each sequence's first query, and T; in ``keys``, of its first key,
        # and K.
        self.query_starts = copy_to(device, query_lengths.cumsum(dtype=np.int32))
        self.key_starts = copy_to(device, key_lengths.cumsum(dtype=np.int32))
        self.keys = copy_to(device, np.concatenate(keys))  # the index in the row of each
        self.longest_query, self.longest_key = int(query_lengths.max()), int(key_lengths.max())

    def attend(
        self,
        query: Float[Tensor, "1 heads T width"],
        key: Float[Tensor, "1 key_heads T width"],
        value: Float[Tensor, "1 key_heads T width"],
        scaling: float,
        window: int | None = None,
    ) -> Float[Tensor, "1 T heads width"]:
        """Compute attention of the row's tokens to their prompts and earlier tokens, at most the
        last ``window``, the token itself included."""
        key, value = (_Gather.apply(x[0].transpose(0, 1), self.keys) for x in (key, value))  # type: ignore[misc]
        output: Any = _run_kernel(
            query[0].transpose(0, 1),
            key,
            value,
            self.query_starts,
            self.key_starts,
            self.longest_query,
            self.longest_key,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )
        return output[None]


def attend_in_segments(
    query: Float[Tensor, "1 heads T width"],
    key: Float[Tensor, "1 heads T width"],
    value: Float[Tensor, "1 heads T width"],
    starts: Int[Tensor, " starts"],
    longest: int,
    scaling: float,
) -> Float[Tensor, "1 T heads width"]:
    """Compute attention of each token to all tokens of its segment; ``starts`` ends with T."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    output: Any = _run_kernel(q, k, v, starts, starts, longest, longest, scale=scaling)
    return output[None]


def attend_cached(
    query: Float[Tensor, "S n key_heads width"],
    key: Float[Tensor, "S m key_heads width"],
    value: Float[Tensor, "S m key_heads width"],
    starts: tuple[Int[Tensor, " starts"], Int[Tensor, " starts"]],
    visible: tuple[Int[Tensor, " S"], int],
    scaling: float,
) -> tuple[Float[Tensor, "S n key_heads width"], Float[Tensor, "S n key_heads"]]:
    """Compute attention of every query of a row to the row's first keys; return the output, and the
    log-sum-exps in float32.

    ``starts`` are the indices of each row's first query and first key, and the numbers of both;
    ``visible`` the number of keys that each row sees, and an upper bound; all int32.
    """
    lengths, longest = visible
    output, lse = _run_kernel(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        *starts,
        query.shape[1],
        longest,
        scale=scaling,
        seqused_k=lengths,
        return_aux=AuxRequest(lse=True),
    )
    return output.view_as(query), lse.T.view(query.shape[:3])


class _Gather(torch.autograd.Function):
    """``rows[index]``; the gradients of repeated rows are summed in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grad_outputs[0]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.count, *grad.shape[1:]), dtype=wide)
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None
