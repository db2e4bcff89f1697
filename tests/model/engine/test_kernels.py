"""Causal attention equals attention with an explicit mask, in every dtype and block size."""

from __future__ import annotations

import pytest
import torch
from gradients import output_and_gradients, relative_error
from torch import Tensor

from vlm_grpo.model.engine import kernels

TOKENS, HEADS, KEY_HEADS, WIDTH, SCALING = 11, 4, 2, 16, 0.25


def masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = (query @ key.mT * SCALING).masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return kernels.causal(query, key, value, SCALING)


# Bounds as in test_attention.py; 11 queries are one block, or three, the last one shorter.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("block", [4, 128])
def test_causal_attention_equals_masked_attention(
    dtype: torch.dtype, bound: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CAUSAL_BLOCK", block)
    torch.manual_seed(0)
    shapes = [(3, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found = output_and_gradients(causal, tensors)
    for value, expected in zip(found, output_and_gradients(masked_attention, exact), strict=True):
        assert value.dtype == dtype
        assert relative_error(value, expected) < bound


def test_gradients_summed_over_blocks_lose_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(1, 2, 256, WIDTH, dtype=torch.float64) for _ in range(3)]
    errors = []
    for block in (256, 4):
        monkeypatch.setattr(kernels, "CAUSAL_BLOCK", block)
        grads = []
        for dtype in (torch.float64, torch.bfloat16):
            tensors = [t.bfloat16().to(dtype).requires_grad_() for t in exact]
            grads.append(output_and_gradients(causal, tensors)[2:])
        errors.append([relative_error(a, b) for b, a in zip(*grads, strict=True)])
    # 64 sums in bfloat16 would have about three times the error of one product.
    for one_block, many_blocks in zip(*errors, strict=True):
        assert many_blocks < 1.3 * one_block


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.float32, "PyTorch's flash kernels for CPUs"),
        ("cpu", torch.bfloat16, "matrix products without a mask"),
        ("meta", torch.float32, "matrix products without a mask"),
    ],
)
def test_the_kernels_are_named(device: str, dtype: torch.dtype, name: str) -> None:
    assert kernels.describe(torch.device(device), dtype) == name


def test_the_kernel_of_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.varlen, "has_varlen", lambda query: True)
    name = "PyTorch's varlen_attn, one call per layer"
    assert kernels.describe(torch.device("cpu"), torch.bfloat16) == name
