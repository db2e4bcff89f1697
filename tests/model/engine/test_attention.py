"""Packed attention and its gradient equal attention with an explicit mask, in every dtype."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gradients import output_and_gradients, relative_error
from torch import Tensor
from varlen_kernel import use_plain_varlen

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import Layer, PackedAttention
from vlm_grpo.model.engine.varlen import GroupSpan, VarlenPlan, _Gather
from vlm_grpo.model.families.shared_form import ALL_LAYERS

SPANS = [GroupSpan(0, 9, (4, 0, 7)), GroupSpan(20, 5, (3, 3)), GroupSpan(31, 6, ())]
TOKENS, HEADS, KEY_HEADS, WIDTH, SCALING = 37, 4, 2, 16, 0.25
LAYER = Layer(0, "full_attention", SCALING)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, window: int = TOKENS) -> Tensor:
    """Compute the definition: a token attends to earlier ones of its prompt and completion, at most
    to the last ``window``."""
    owner, group, position = [], [], []
    for index, span in enumerate(SPANS):
        owner += [0] * span.prompt_length
        owner += [c + 1 for c, length in enumerate(span.completion_lengths) for _ in range(length)]
        group += [index] * (span.prompt_length + sum(span.completion_lengths))
        position += range(span.prompt_length)
        for length in span.completion_lengths:
            position += range(span.prompt_length, span.prompt_length + length)
    o, g, p = torch.tensor(owner), torch.tensor(group), torch.tensor(position)
    order = torch.arange(TOKENS)
    visible = (g[:, None] == g) & (order[:, None] >= order) & ((o == 0) | (o[:, None] == o))
    visible &= p[:, None] - p < window
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = (query @ key.mT * SCALING).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


# Two roundings of 2^-8 in bfloat16; float32 and float64 round sums of 16 and 16 products.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
# 40 scores are two queries of 9 keys and 2 heads.
@pytest.mark.parametrize("max_scores", [40, 2**24])
def test_packed_attention_equals_masked_attention(
    dtype: torch.dtype, bound: float, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    packed = functools.partial(PackedAttention(SPANS), LAYER)
    found = output_and_gradients(packed, tensors)
    for value, expected in zip(found, output_and_gradients(masked_attention, exact), strict=True):
        assert relative_error(value, expected) < bound


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("in_one_kernel", [False, True])
def test_packed_attention_in_windows_equals_masked_attention(
    in_one_kernel: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_one_kernel:
        use_plain_varlen(monkeypatch)
    torch.manual_seed(0)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    packed = functools.partial(PackedAttention(SPANS), LAYER._replace(window=window))
    defined = functools.partial(masked_attention, window=window or TOKENS)
    found = output_and_gradients(packed, tensors)
    for value, expected in zip(found, output_and_gradients(defined, tensors), strict=True):
        assert relative_error(value, expected) < 1e-12


def test_one_kernel_and_a_mask_for_some_prompts_equal_merged_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    mask = torch.ones(9, 9, dtype=torch.bool).tril() | (torch.rand(9, 9) < 0.5)
    masks: Any = [{ALL_LAYERS: mask}, {}, {"another": mask}]
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    packed = functools.partial(PackedAttention(SPANS, masks), LAYER)
    merged = output_and_gradients(packed, tensors)
    use_plain_varlen(monkeypatch)
    for value, expected in zip(output_and_gradients(packed, tensors), merged, strict=True):
        assert relative_error(value, expected) < 1e-12


def test_the_plan_of_a_row_is_built_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_varlen(monkeypatch)
    built, build = [], VarlenPlan.build

    def record(*arguments: Any) -> VarlenPlan:
        built.append(build(*arguments))
        return built[-1]

    monkeypatch.setattr(VarlenPlan, "build", record)
    attend = PackedAttention(SPANS)
    tensors = [torch.randn(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    for index in range(3):
        attend(LAYER._replace(index=index), *tensors)
    assert len(built) == 1


def test_gradients_of_repeated_keys_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_varlen(monkeypatch)
    span = GroupSpan(0, 1, (1,) * 256)
    q, k, v = (torch.ones(1, 1, 257, 1).bfloat16().requires_grad_() for _ in range(3))
    PackedAttention([span])(LAYER, q, k, v).sum().backward()
    # The prompt's value has weight 1 in its own output and 1/2 in those of 256 completions; a sum
    # in bfloat16 would stop at 128.
    assert v.grad is not None
    assert v.grad[0, 0, 0, 0] == 129


def test_gradients_of_keys_that_many_completions_share_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The CPU's kernel has a wide sum of its own; a GPU's adds in the precision of the tensor.
    precisions, add = [], Tensor.index_add_

    def record(total: Tensor, *arguments: Any) -> Tensor:
        precisions.append(total.dtype)
        return add(total, *arguments)

    monkeypatch.setattr(Tensor, "index_add_", record)
    rows = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    gathered: Tensor = _Gather.apply(rows, torch.tensor([0] * 1000 + [1]))  # type: ignore[assignment]
    gathered.sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [1000, 1]
    assert precisions == [torch.float32]
