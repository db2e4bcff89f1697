"""Kernels of attention over a shared prompt. A mask of the entire row is never built.

In half precision on CUDA one kernel for sequences of different lengths computes a packed row: a
prompt attends causally to itself, and the keys of a completion are those of its prompt followed by
its own. The kernel's causal diagonal is aligned at the last query and the last key, so the first
token of a completion sees the whole prompt and itself.

On CPUs attention over the prompt and over a completion's own tokens, without masks, are merged by
their log-sum-exps. A softmax over a union of keys is the mean of the softmaxes over its parts,
weighted by their partition sums, so the merge is exact; and the backward of each part needs only
the merged output and log-sum-exp (as in ring attention: Liu et al., 2023, arXiv:2310.01889).
Prompts that are not causal and sliding windows have a mask, and so has each completion in float32
and float64 on other devices, of whose kernels no public one returns the log-sum-exp.
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

_PART, _MOST_PARTS = 256, 16
"""Fewest keys of a part of a prompt on average, and the most parts."""


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
        """Return the places of the prompt, and of each completion with all that it continues."""
        start = self.start + self.prompt_length
        found = [np.arange(self.start, start)]
        parents = self.parents or (-1,) * len(self.completion_lengths)
        for parent, length in zip(parents, self.completion_lengths, strict=True):
            found.append(np.concatenate([found[parent + 1], np.arange(start, start + length)]))
            start += length
        return found


def describe(device: torch.device, dtype: torch.dtype) -> str:
    query = torch.empty(0, dtype=dtype, device=device)
    if has_varlen(query):
        return "FlashAttention, one call per layer"
    return "PyTorch's flash kernels for CPUs" if is_cpu(query) else "PyTorch's, with masks"


def has_varlen(query: Tensor) -> bool:
    """Return whether the kernel for sequences runs on the query's device and in its precision."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def is_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def count_parts(device: torch.device, sequences: int, shortest: int, longest: int) -> int:
    """Return into how many parts sequences of keys are split, so that no multiprocessor is idle.

    The kernel computes a sequence, of ``shortest`` to ``longest`` keys, on one multiprocessor.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(count // sequences, longest // _PART, _MOST_PARTS, shortest))


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
    """Return attention of each sequence to its keys, or to the first ``used``, and log-sum-exps.

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
            sizes = span.prompt_length, *span.completion_lengths
            for length, seen in zip(sizes, span.list_paths(), strict=True):
                if length:
                    lengths.append((length, len(seen)))
                    keys.append(seen)
        # The index in the row of each sequence's first query, and T; the index in ``keys`` of its
        # first key, and K.
        starts = np.cumsum(lengths, axis=0, dtype=np.int32).T.copy()
        self.starts = [copy_to(device, row) for row in starts]
        self.keys = copy_to(device, np.concatenate(keys))  # the index in the row of each
        self.longest = [max(sizes) for sizes in zip(*lengths, strict=True)]

    def attend(
        self, layer: Layer, query: Tensor, key: Tensor, value: Tensor
    ) -> Float[Tensor, "1 T heads width"]:
        """Compute attention of the row's tokens to their prompts and earlier tokens."""
        query, key, value = _Gather.apply(query, key, value, self.keys)  # type: ignore[misc]
        sizes, options = (self.starts, self.longest), {"causal": True, "window": layer.window}
        return run_varlen(query, key, value, *sizes, layer.scaling, **options)[0][None]


class _Gather(torch.autograd.Function):
    """The queries (T, heads, width) of a row, and its keys and values (K, key heads, width) by an
    index; the gradients of repeated ones are summed in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "1 heads T width"],
        key: Float[Tensor, "1 key_heads T width"],
        value: Float[Tensor, "1 key_heads T width"],
        index: Int[Tensor, " K"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(index)
        ctx.length = key.shape[2]
        rows, keys, values = (_permute(x, (2, 1, 3)) for x in (query, key, value))
        return rows, keys.index_select(0, index), values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        d_query, *d_keys = grad_outputs
        grads = torch.stack(d_keys)
        wide = torch.float64 if grads.dtype == torch.float64 else torch.float32
        total = grads.new_zeros((2, ctx.length, *grads.shape[2:]), dtype=wide)
        total = total.index_add_(1, index, grads.to(wide)).to(grads.dtype)
        return d_query.transpose(0, 1)[None], *total.transpose(1, 2).split(1), None


def _permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the view of x with these axes, of which others have length 1, by one operation."""
    shape, strides = ([sizes[axis] for axis in axes] for sizes in (x.shape, x.stride()))
    return x.as_strided(shape, strides)


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
    if mask is None and layer.needs_mask(length):
        mask = build_window_mask(length, length, layer.window, query.device)
    return attend(layer, query, key, value, mask)


def attend_completions(
    layer: Layer, prompt: Sequence[Tensor], own: Sequence[Tensor], lengths: Sequence[int]
) -> Float[Tensor, "1 heads T width"]:
    """Compute attention of completions to their prompt and, causally, of each to itself, both given
    by queries, keys and values."""
    (_, prompt_key, prompt_value), (query, key, value) = prompt, own
    size, longest = prompt_key.shape[2], max(lengths)
    if is_cpu(query) and not layer.needs_mask(size + longest):
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
    return repack(attend(layer, unpack(query, lengths), keys, values, mask), lengths)


def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention by a mask, or causally (None)."""
    # A GPU's kernels for queries that share keys are of half precision, or hold all scores.
    if layer.cap is not None or not is_cpu(query):
        times = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    if layer.cap is None:
        return scaled_dot_product_attention(
            *(query, key, value, mask),
            is_causal=mask is None,
            scale=layer.scaling,
            enable_gqa=key.shape[1] < query.shape[1],
        )
    assert mask is not None  # a cap needs one
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
        to_prefix, prefix_lse = FLASH(query, prefix_key, prefix_value, scale=scaling)
        own = (unpack(x, lengths) for x in (query, key, value))
        to_self, self_lse = FLASH(*own, is_causal=True, scale=scaling)
        to_self, self_lse = repack(to_self, lengths), repack(self_lse[..., None], lengths)
        prefix_lse = prefix_lse[..., None]
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
        grad = grad_outputs[0].contiguous()
        row = (grad, query, prefix_key, prefix_value, output, lse[..., 0])
        d_prefix = _FLASH_BACKWARD(*row, 0.0, False, scale=scaling)
        own = (grad, query, key, value, output, lse)
        # Without AMX, the backward over short rows is twice as fast in float32 as in bfloat16.
        has_tiles = torch.cpu.get_capabilities().get("amx_tile", True)
        wide = query.dtype if has_tiles else torch.promote_types(query.dtype, torch.float32)
        *rows, sums = (unpack(x, lengths) for x in own)
        rows = [x.to(wide) for x in rows]
        d_own = _FLASH_BACKWARD(*rows, sums[..., 0], 0.0, True, scale=scaling)
        d_query, d_key, d_value = (repack(x.to(query.dtype), lengths) for x in d_own)
        return d_prefix[0] + d_query, d_prefix[1], d_prefix[2], d_key, d_value, None, None


cascade: Any = _Cascade.apply


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
