"""Attention with masks, and in sliding windows, equals its definition."""

from __future__ import annotations

import pytest
import torch
from gradients import output_and_gradients, relative_error
from torch import Tensor

from vlm_grpo.model.engine import masked
from vlm_grpo.model.engine.attention import Layer, PackedAttention
from vlm_grpo.model.engine.varlen import GroupSpan

SPANS = [GroupSpan(0, 9, (4, 0, 7)), GroupSpan(20, 5, (3, 3)), GroupSpan(31, 6, ())]
HEADS, KEY_HEADS, WIDTH, SCALING = 4, 2, 16, 0.25


def attend_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float | None) -> Tensor:
    """Compute one sequence's attention by its definition."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * SCALING
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, layer: Layer, masks: list[Tensor | None]
) -> Tensor:
    """Compute every completion behind its own copy of the prompt."""
    outputs = []
    for (start, length, completions), prompt_mask in zip(SPANS, masks, strict=True):
        first = start + length
        for number, count in enumerate((0, *completions)):
            rows = [*range(start, start + length), *range(first, first + count)]
            first += count
            order = torch.arange(len(rows))
            mask = order[:, None] >= order
            if layer.window is not None:
                mask &= order > order[:, None] - layer.window
            if prompt_mask is not None:
                mask[:length, :length] = prompt_mask
            q, k, v = (x[:, :, rows] for x in (query, key, value))
            output = attend_alone(q, k, v, mask, layer.cap)
            outputs.append(output[:, :, length if number else 0 :])
    return torch.cat(outputs, dim=2).transpose(1, 2)


def block_mask(length: int) -> Tensor:
    """Return a causal mask in which the second to fourth token see each other."""
    mask = torch.ones(length, length).tril().bool()
    mask[1:4, 1:4] = True
    return mask


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2, 5, 9, 12, 40])
def test_packed_attention_equals_its_definition(
    window: int | None, cap: float | None, has_mask: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, 37, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    layer = Layer(0, "sliding_attention", SCALING, window, cap)
    masks: list[Tensor | None] = [block_mask(9), None, block_mask(6)]
    if not has_mask:
        masks = [None] * 3
    given = [{} if mask is None else {"sliding_attention": mask} for mask in masks]
    packed = PackedAttention(SPANS, given)
    found = output_and_gradients(lambda q, k, v: packed(layer, q, k, v), tensors)
    expected = output_and_gradients(
        lambda q, k, v: attend_by_definition(q, k, v, layer, masks), tensors
    )
    for value, exact in zip(found, expected, strict=True):
        assert relative_error(value, exact) < 1e-12


def test_masks_of_other_layers_are_ignored() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, h, 9, WIDTH) for h in (HEADS, KEY_HEADS, KEY_HEADS)]
    span, layer = GroupSpan(0, 9, ()), Layer(0, "full_attention", SCALING)
    plain = PackedAttention([span])(layer, *tensors)
    masks = {"sliding_attention": block_mask(9)}
    assert torch.equal(PackedAttention([span], [masks])(layer, *tensors), plain)
    masks = {"": block_mask(9)}
    assert not torch.equal(PackedAttention([span], [masks])(layer, *tensors), plain)


def test_a_window_mask_shows_the_last_tokens() -> None:
    mask = masked.build_window_mask(2, 5, 3, torch.device("cpu"))
    assert mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
