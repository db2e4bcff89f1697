"""Kernels of attention over a shared prompt. A mask of the entire row is never built.

In half precision on CUDA one kernel for sequences of different lengths computes a packed row: a
prompt attends causally to itself, and the keys of a completion are those of its prompt followed by
its own. The kernel's causal diagonal is aligned at the last query and the last key, so the first
token of a completion sees the whole prompt and itself.

Elsewhere parts without a mask are merged by their log-sum-exps, and prompts that are not causal and
sliding windows have a mask. On CPUs, the parts use PyTorch's flash kernel in float32 and float64.
In bfloat16 that kernel is no faster than in float32 (``perf/README.md``), so they use plain matrix
products, which round the scores as transformers' eager attention does. So do float32 and float64 on
other devices.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from vlm_grpo.model.transfer import copy_to

# PyTorch's CPU kernels that return the log-sum-exp along with the output.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001

# The kernel for sequences of different lengths. ``varlen_attn``, which calls it, prefers cuDNN's,
# has fewer arguments before torch 2.12, and fills a tensor in each call.
FLASH_VARLEN = torch.ops.aten._flash_attention_forward  # noqa: SLF001

MAX_SCORES = 2**24  # maximum number of attention scores held at once by plain matrix products
CAUSAL_BLOCK = 128
"""Queries per block of causal attention by plain matrix products: a single product over all keys
would spend half of its work on masked scores."""


class Layer(NamedTuple):
    """An attention layer of the language model."""

    index: int
    kind: str  # its type in transformers' configuration
    scaling: float  # factor on the dot products
    window: int | None = None  # number of tokens that each token sees, itself included; None: all
    cap: float | None = None
    """Scores become cap · tanh(score / cap) (Gemma 2: 2024, arXiv:2408.00118), which no kernel
    computes; None: they stay."""

    def needs_mask(self, length: int) -> bool:
        """Return whether the kernels without a mask cannot compute rows of ``length`` tokens."""
        return self.cap is not None or (self.window is not None and self.window < length)


class GroupSpan(NamedTuple):
    """The location in a packed row of one group: a prompt followed by its completions."""

    start: int
    prompt_length: int
    completion_lengths: tuple[int, ...]
    # number of the completion that each one continues, a trunk; -1 or empty: the prompt
    parents: tuple[int, ...] = ()

    @property
    def levels(self) -> list[tuple[int, tuple[int, ...]]]:
        """The lengths of the neighbors that continue the same, and its number, -1: the prompt."""
        parents = self.parents or (-1,) * len(self.completion_lengths)
        pairs = zip(parents, self.completion_lengths, strict=True)
        runs = itertools.groupby(pairs, key=operator.itemgetter(0))
        return [(parent, tuple(length for _, length in run)) for parent, run in runs]

    def list_paths(self) -> list[np.ndarray]:
        """Return the places of the prompt with each completion, or of the prompt alone."""
        prompt, start = np.arange(self.start, self.start + self.prompt_length), 0
        found = []
        for length in self.completion_lengths:
            own = prompt[-1] + 1 + np.arange(start, start + length)
            found.append(np.concatenate([prompt, own]))
            start += length
        return found or [prompt]


def describe(device: torch.device, dtype: torch.dtype) -> str:
    query = torch.empty(0, dtype=dtype, device=device)
    if has_varlen(query):
        return "FlashAttention, one call per layer"
    if _uses_plain_products(query):
        return "matrix products without a mask"
    return "PyTorch's flash kernels for CPUs"


def has_varlen(query: Tensor) -> bool:
    """Return whether the kernel for sequences runs on the query's device and in its precision."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def is_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _uses_plain_products(query: Tensor) -> bool:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    # No public kernel returns the log-sum-exp; of the private ones, only the CPU's is used.
    return is_half if is_cpu(query) else not is_half


def run_varlen(
    query: Float[Tensor, "T heads width"],
    key: Float[Tensor, "K key_heads width"],
    value: Float[Tensor, "K key_heads width"],
    starts: Sequence[Int[Tensor, " starts"]],
    longest: Sequence[int],
    scale: float,
    causal: bool = False,
    window: int | None = None,
    used: Int[Tensor, " sequences"] | None = None,
) -> tuple[Float[Tensor, "T heads width"], Float[Tensor, "heads T"]]:
    """Compute attention of each sequence to its keys, or to the first ``used``; return it with its
    log-sum-exps.

    ``starts`` are int32 indices of the sequences' first queries, and of their first keys; both end
    with the total. ``causal``: each query sees the last ``window`` keys up to its own; the last
    query's own key is the last one. Sampling and scoring use FlashAttention alike; cuDNN's kernel
    would build a plan for each new shape, and decode steps have many.
    """
    output, lse, *_ = FLASH_VARLEN(
        *(query, key, value, *starts, *longest, 0.0, causal and window is None, False),
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
        seqused_k=used,
    )
    return output, lse


class VarlenPlan:
    """The sequences of a packed row, which the spans cover, and their K keys, on the row's device.

    Empty completions are no sequences. A prompt's keys are repeated for each completion.
    """

    def __init__(self, spans: Sequence[GroupSpan], device: torch.device) -> None:
        lengths = [(0, 0)]
        keys: list[np.ndarray] = []
        for span in spans:
            start = span.start + span.prompt_length
            prompt = np.arange(span.start, start)
            lengths.append((len(prompt), len(prompt)))
            keys.append(prompt)
            seen: list[np.ndarray] = []
            parents = span.parents or (-1,) * len(span.completion_lengths)
            for parent, length in zip(parents, span.completion_lengths, strict=True):
                own = np.arange(start, start + length)
                seen.append(np.concatenate([prompt if parent < 0 else seen[parent], own]))
                if length:
                    lengths.append((length, len(seen[-1])))
                    keys.append(seen[-1])
                start += length
        # The index in the row of each sequence's first query, and T; in ``keys``, of its first key,
        # and K.
        starts = np.cumsum(lengths, axis=0, dtype=np.int32).T.copy()
        self.starts = [copy_to(device, row) for row in starts]
        self.keys = copy_to(device, np.concatenate(keys))  # the index in the row of each
        self.longest = [max(sizes) for sizes in zip(*lengths, strict=True)]

    def attend(
        self, layer: Layer, query: Tensor, key: Tensor, value: Tensor
    ) -> Float[Tensor, "1 T heads width"]:
        """Compute attention of the row's tokens to their prompts and earlier tokens."""
        key, value = (_Gather.apply(x[0].transpose(0, 1), self.keys) for x in (key, value))  # type: ignore[misc]
        tensors = query[0].transpose(0, 1), key, value
        options = {"causal": True, "window": layer.window}
        return run_varlen(*tensors, self.starts, self.longest, layer.scaling, **options)[0][None]


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


def attend_in_segments(
    query: Float[Tensor, "1 heads T width"],
    key: Float[Tensor, "1 heads T width"],
    value: Float[Tensor, "1 heads T width"],
    starts: Int[Tensor, " starts"],
    lengths: Sequence[int],
    scaling: float,
) -> Float[Tensor, "1 T heads width"]:
    """Compute attention of each token to all tokens of its segment; ``starts`` ends with T."""
    if has_varlen(query):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return run_varlen(q, k, v, [starts] * 2, [max(lengths)] * 2, scaling)[0][None]
    # Neighboring segments of equal lengths are computed at once.
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *parts in zip(
        runs, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        output = scaled_dot_product_attention(q, k, v, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def attend_prompt(
    layer: Layer, prompt: Sequence[Tensor], mask: Bool[Tensor, "T T"] | None
) -> Float[Tensor, "1 heads T width"]:
    """Compute attention of a prompt, given by its queries, keys and values, to itself: causal in
    the layer's window, or by the mask."""
    query, key, value = prompt
    length = query.shape[2]
    if mask is None and not layer.needs_mask(length):
        return causal(query, key, value, layer.scaling)
    if mask is None:
        mask = build_window_mask(length, length, layer.window, query.device)
    return _attend_masked(layer, query, key, value, mask)


def attend_completions(
    layer: Layer, prompt: Sequence[Tensor], own: Sequence[Tensor], lengths: Sequence[int]
) -> Float[Tensor, "1 heads T width"]:
    """Compute attention of completions to their prompt and, causally, of each to itself, both given
    by queries, keys and values."""
    (_, prompt_key, prompt_value), (query, key, value) = prompt, own
    size, longest = prompt_key.shape[2], max(lengths)
    if not layer.needs_mask(size + longest):
        return cascade(query, prompt_key, prompt_value, key, value, lengths, layer.scaling)
    # Each completion needs a copy of the end of its prompt, no longer than the window.
    seen = min(size, (layer.window or size + longest) - 1)
    keys, values = (
        torch.cat(
            [x[:, :, size - seen :].expand(len(lengths), -1, -1, -1), unpack(y, lengths)], dim=2
        )
        for x, y in ((prompt_key, key), (prompt_value, value))
    )
    mask = build_window_mask(longest, seen + longest, layer.window, query.device)
    return repack(_attend_masked(layer, unpack(query, lengths), keys, values, mask), lengths)


def attend_path(
    layer: Layer, prompt: Sequence[Tensor], own: Sequence[Tensor], mask: Bool[Tensor, "n m"]
) -> Float[Tensor, "1 heads n width"]:
    """Compute attention of one completion to its prompt and itself by a mask."""
    keys, values = (torch.cat([x, y], dim=2) for x, y in zip(prompt[1:3], own[1:3], strict=True))
    return _attend_masked(layer, own[0], keys, values, mask)


def _attend_masked(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = expand_heads(query, key), expand_heads(query, value)
    if layer.cap is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=layer.scaling)
    scores = torch.tanh(query @ key.mT * (layer.scaling / layer.cap)) * layer.cap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value


def build_window_mask(
    queries: int, keys: int, window: int | None, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Return the mask of causal attention to the last ``window`` tokens, each token included; the
    last query belongs to the last key."""
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= last) & (key > last - (window or keys))


def causal(
    query: Float[Tensor, "rows heads T width"],
    key: Float[Tensor, "rows key_heads T width"],
    value: Float[Tensor, "rows key_heads T width"],
    scaling: float,
) -> Float[Tensor, "rows heads T width"]:
    if _uses_plain_products(query):
        return _Causal.apply(query, key, value, scaling)  # type: ignore[return-value]
    options: dict[str, Any] = {"is_causal": True, "scale": scaling}
    if is_cpu(query):
        key, value = expand_heads(query, key), expand_heads(query, value)
    else:
        options["enable_gqa"] = True
    return scaled_dot_product_attention(query, key, value, **options)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        output, lse = _part(query, key, value, scaling, causal=True)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        merged = (grad_outputs[0], query, output, lse)
        return *_part_backward(merged, key, value, ctx.scaling, causal=True), None


class _Cascade(torch.autograd.Function):
    """Attention of completions (1, heads, T, width), packed by their lengths, over their prompt
    and, causally, each over itself."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        scaling: float,
    ) -> Tensor:
        to_prefix, prefix_lse = _part(query, prefix_key, prefix_value, scaling, causal=False)
        q, k, v = (unpack(x, lengths) for x in (query, key, value))
        to_self, self_lse = _part(q, k, v, scaling, causal=True)
        to_self, self_lse = repack(to_self, lengths), repack(self_lse, lengths)
        lse = torch.logaddexp(prefix_lse, self_lse)
        output = to_prefix * (prefix_lse - lse).exp() + to_self * (self_lse - lse).exp()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, prefix_key, prefix_value, key, value, output, lse)
        ctx.lengths, ctx.scaling = lengths, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, prefix_key, prefix_value, key, value, output, lse = ctx.saved_tensors
        lengths, scaling = ctx.lengths, ctx.scaling
        merged = (grad_outputs[0].contiguous(), query, output, lse)
        d_prefix = _part_backward(merged, prefix_key, prefix_value, scaling, causal=False)
        *rows, k, v = (unpack(x, lengths) for x in (*merged, key, value))
        own = _part_backward(rows, k, v, scaling, causal=True)
        d_own = [repack(gradient, lengths) for gradient in own]
        return d_prefix[0] + d_own[0], d_prefix[1], d_prefix[2], d_own[1], d_own[2], None, None


cascade: Any = _Cascade.apply


def _part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention over all keys, or causal attention over as many keys as queries; return
    the output, and the log-sum-exps in float32."""
    if _uses_plain_products(query):
        return _plain(query, key, value, scaling, causal)
    if causal:
        expanded = (query, expand_heads(query, key), expand_heads(query, value))
        output, lse = FLASH(*expanded, is_causal=True, scale=scaling)
    else:
        output, lse = FLASH(_stack_heads(query, key), key, value, scale=scaling)
    return output.reshape(query.shape), lse.reshape(*query.shape[:3], 1)


def _part_backward(
    merged: Sequence[Tensor], key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a part's query, key and value, given the gradient of the merged
    output, the query, that output and its log-sum-exp."""
    grad, query, output, lse = merged
    if _uses_plain_products(query):
        return _plain_backward(merged, key, value, scaling, causal)
    if causal:
        expanded = (query, expand_heads(query, key), expand_heads(query, value))
        d_query, d_key, d_value = _FLASH_BACKWARD(
            grad, *expanded, output, lse[..., 0], 0.0, True, scale=scaling
        )
        return d_query, _sum_heads(d_key, key), _sum_heads(d_value, value)
    g, q, o, s = (_stack_heads(x, key) for x in merged)
    d_query, d_key, d_value = _FLASH_BACKWARD(
        g, q, key, value, o, s[..., 0], 0.0, False, scale=scaling
    )
    return d_query.reshape(query.shape), d_key, d_value


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    outputs, sums = [], []
    for rows, seen in _blocks(query, key, causal):
        part = query[:, :, rows]
        weights, top = _weights(part, key[:, :, seen], scaling, causal)
        total = weights.sum(-1, keepdim=True, dtype=torch.float32)
        output = (weights @ value[:, :, seen] / total).to(value.dtype)
        outputs.append(output.reshape(part.shape))
        sums.append((total.log() + top).reshape(*part.shape[:3], 1))
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _plain_backward(
    merged: Sequence[Tensor], key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query = merged[1]
    d_queries = []
    d_key, d_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    for rows, seen in _blocks(query, key, causal):
        k, v, part = key[:, :, seen], value[:, :, seen], query[:, :, rows]
        weights, top = _weights(part, k, scaling, causal)
        g, q, o, s = (_stack_heads(x[:, :, rows], key) for x in merged)
        # Scale the gradient, the smaller tensor, by the part's share of the merged softmax.
        g = g * (top - s).exp()
        mean = (g * o).sum(-1, keepdim=True)
        g = g.to(weights.dtype)
        d_value[:, :, seen] += weights.mT @ g
        d_scores = (g @ v.mT).sub_(mean).mul_(weights)
        d_queries.append((d_scores @ k * scaling).reshape(part.shape))
        d_key[:, :, seen] += d_scores.mT @ (q * scaling)
    return torch.cat(d_queries, dim=2), d_key.to(key.dtype), d_value.to(value.dtype)


def _weights(query: Tensor, key: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return ``exp(scores - top)`` and ``top``, the largest score of each query, stacked.

    In causal attention the last n keys belong to the n queries.
    """
    scores = (_stack_heads(query, key) * scaling) @ key.mT
    if causal:
        count = query.shape[2]
        later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        last = scores.unflatten(2, (-1, count))[..., -count:]
        last.masked_fill_(later, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    return scores.sub_(top).exp_(), top


def _blocks(query: Tensor, key: Tensor, causal: bool) -> list[tuple[slice, slice]]:
    """Return the queries whose scores are held at once, and the keys that they see."""
    count, keys = query.shape[2], key.shape[2]
    size = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * keys))
    if causal:
        size = min(size, CAUSAL_BLOCK)
    starts = range(0, count, size)
    return [(slice(n, n + size), slice(min(n + size, count) if causal else keys)) for n in starts]


def expand_heads(
    query: Float[Tensor, "rows heads n width"], key: Float[Tensor, "rows key_heads m width"]
) -> Float[Tensor, "rows heads m width"]:
    """Repeat keys or values for grouped-query attention."""
    times = query.shape[1] // key.shape[1]
    return key if times == 1 else key.repeat_interleave(times, dim=1)


def _stack_heads(rows: Tensor, key: Tensor) -> Tensor:
    """Stack the queries (rows, heads, n, width) that share a key head into one matrix."""
    return rows.reshape(rows.shape[0], key.shape[1], -1, rows.shape[-1])


def _sum_heads(grad: Tensor, key: Tensor) -> Tensor:
    if grad.shape == key.shape:
        return grad
    return grad.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)


def unpack(packed: Tensor, lengths: Sequence[int]) -> Tensor:
    """Pad (1, heads, sum of lengths, width) to (completions, heads, longest, width)."""
    if len(set(lengths)) == 1:
        heads, width = packed.shape[1], packed.shape[3]
        return packed.view(heads, len(lengths), lengths[0], width).transpose(0, 1)
    rows = packed[0].transpose(0, 1).split(list(lengths))
    return pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def repack(padded: Tensor, lengths: Sequence[int]) -> Tensor:
    rows = [row[:, :length] for row, length in zip(padded, lengths, strict=True)]
    return torch.cat(rows, dim=1)[None]
