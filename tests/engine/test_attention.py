"""Packed attention and its gradient equal plain masked attention, in every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlm_grpo.engine import kernels
from vlm_grpo.engine.attention import GroupSpan, PackedAttention

SPANS = [GroupSpan(0, 9, (4, 0, 7)), GroupSpan(20, 5, (3, 3)), GroupSpan(31, 6, ())]
TOKENS, HEADS, KEY_HEADS, WIDTH, SCALING = 37, 4, 2, 16, 0.25


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition: a token sees what came before it in its prompt and its own completion."""
    owner, group = [], []
    for index, span in enumerate(SPANS):
        owner += [0] * span.prompt_length
        owner += [c + 1 for c, length in enumerate(span.completion_lengths) for _ in range(length)]
        group += [index] * (span.stop - span.start)
    o, g = torch.tensor(owner), torch.tensor(group)
    order = torch.arange(TOKENS)
    seen = (g[:, None] == g) & (order[:, None] >= order) & ((o == 0) | (o[:, None] == o))
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = (query @ key.mT * SCALING).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(attend, tensors: list[Tensor]) -> list[Tensor]:
    output = attend(*tensors)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    grads = torch.autograd.grad((output * weights).sum(), tensors)
    return [output, *grads]


# Two roundings of 2^-8 in bfloat16; float32 and float64 round sums of 16 and 16 products.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
@pytest.mark.parametrize("at_once", [40, 2**24])  # 40 scores are two queries of 9 keys and 2 heads
def test_packed_attention_is_the_masked_one(
    dtype: torch.dtype, bound: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_SCORES", at_once)
    tensors = inputs(dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = results(plain, exact)
    packed = PackedAttention(SPANS)
    found = results(lambda q, k, v: packed(0, q, k, v, SCALING), tensors)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < bound


# Bounds as above; 11 queries are one block, or three of which the last is shorter.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("block", [4, 128])
def test_prompts_attend_causally(
    dtype: torch.dtype, bound: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CAUSAL_BLOCK", block)
    torch.manual_seed(0)
    shapes = [(3, heads, 11, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
        later = torch.ones(11, 11, dtype=torch.bool).triu(1)
        scores = (query @ key.mT * SCALING).masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ value

    expected = results(masked, exact)
    found = results(lambda q, k, v: kernels.causal(q, k, v, SCALING), tensors)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() / theirs.norm() < bound


def test_sums_over_blocks_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(1, 2, 256, WIDTH, dtype=torch.float64) for _ in range(3)]
    errors = []
    for block in (256, 4):
        monkeypatch.setattr(kernels, "CAUSAL_BLOCK", block)
        grads = []
        for dtype in (torch.float64, torch.bfloat16):
            tensors = [t.bfloat16().to(dtype).requires_grad_() for t in exact]
            grads.append(results(lambda q, k, v: kernels.causal(q, k, v, SCALING), tensors)[2:])
        pairs = zip(*grads, strict=True)
        errors.append([(mine.double() - right).norm() / right.norm() for right, mine in pairs])
    # 64 sums in bfloat16 would be about three times as far off as one product.
    for whole, blocks in zip(*errors, strict=True):
        assert blocks < 1.3 * whole
