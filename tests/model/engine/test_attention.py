"""Attention and recurrent layers over packed rows equal their definition, with their gradients."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from family_policies import build_family_policy
from gpu_standins import use_plain_varlen
from gradients import output_and_gradients, relative_error
from recorded import record_calls
from torch import Tensor

from vlm_grpo.model.engine import attention, kernels
from vlm_grpo.model.engine.attention import LayerState, PackedAttention, find_recurrent_layers
from vlm_grpo.model.engine.kernels import GroupSpan, Layer, _Gather

SPANS = [GroupSpan(0, 9, (4, 0, 7)), GroupSpan(20, 5, (2, 1, 2, 1), (-1, -1, 0, 0))]
SPANS.append(GroupSpan(31, 6, ()))
TOKENS, HEADS, KEY_HEADS, WIDTH, SCALING = 37, 4, 2, 16, 0.25
LAYER = Layer(0, "full_attention", SCALING)
Masks = Sequence[Tensor | None]
NO_MASKS: Masks = (None,) * 3


def build_tensors(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> list[Tensor]:
    """Return random queries, keys and values."""
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float | None = None) -> Tensor:
    """Compute one sequence's attention by its definition."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * SCALING
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def list_sequences() -> Iterator[tuple[int, list[int], int]]:
    """Yield the places of each prompt, and of each completion behind its prompt: the number of
    its group, the places in the row and how many of them come before the sequence's own."""
    for group, (start, length, completions, parents) in enumerate(SPANS):
        rows, first = [list(range(start, start + length))], start + length
        yield group, rows[0], 0
        for count, parent in zip(completions, parents or (-1,) * len(completions), strict=True):
            before = rows[parent + 1]  # of the prompt, or of a trunk
            rows.append([*before, *range(first, first + count)])
            yield group, rows[-1], len(before)
            first += count


def attend_by_definition(tensors: Sequence[Tensor], layer: Layer, masks: Masks) -> Tensor:
    """Compute every completion behind its own copy of the prompt."""
    outputs = []
    for group, rows, before in list_sequences():
        order = torch.arange(len(rows))
        mask = order[:, None] >= order
        if layer.window is not None:
            mask &= order > order[:, None] - layer.window
        if (prompt_mask := masks[group]) is not None:
            mask[: len(prompt_mask), : len(prompt_mask)] = prompt_mask
        output = attend(*(x[:, :, rows] for x in tensors), mask, layer.cap)  # type: ignore[arg-type]
        outputs.append(output[:, :, before:])
    return torch.cat(outputs, dim=2).transpose(1, 2)


def compare(
    tensors: list[Tensor], bound: float, layer: Layer = LAYER, masks: Masks = NO_MASKS
) -> None:
    """Compare packed attention and its gradients with the definition in float64."""
    given = [{} if mask is None else {layer.kind: mask} for mask in masks]
    packed = PackedAttention(SPANS, given)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found = output_and_gradients(lambda *x: packed(layer, *x), tensors)
    expected = output_and_gradients(lambda *x: attend_by_definition(x, layer, masks), exact)
    for value, other in zip(found, expected, strict=True):
        assert relative_error(value, other) < bound


# Two roundings of 2^-8 in bfloat16; float32 and float64 round sums of 16 and 16 products.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
@pytest.mark.parametrize(
    ("on_cpu", "has_tiles"),
    [
        pytest.param(True, True, id="CPU with matrix tiles"),
        pytest.param(True, False, id="CPU without them"),
        pytest.param(False, False, id="mask"),
    ],
)
def test_packed_attention_equals_its_definition(dtype, bound, on_cpu, has_tiles, monkeypatch):
    monkeypatch.setattr(kernels, "is_cpu", lambda query: on_cpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": has_tiles})
    compare(build_tensors(dtype), bound)


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"amx_tile": True}, torch.bfloat16),
        ({"amx_tile": False}, torch.float32),
        ({}, torch.bfloat16),  # not x86
    ],
)
def test_only_cpus_without_matrix_tiles_widen_a_backward(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    calls = record_calls(monkeypatch, kernels, "_FLASH_BACKWARD")
    PackedAttention([GroupSpan(0, 5, (4,))])(
        LAYER, *build_tensors(torch.bfloat16, 9)
    ).sum().backward()
    to_prompt, to_itself = ({x.dtype for x in call.arguments[:5]} for call in calls)
    assert (to_prompt, to_itself) == ({torch.bfloat16}, {dtype})


def block_mask(length: int) -> Tensor:
    """Return a causal mask in which the second to fourth token see each other."""
    mask = torch.ones(length, length).tril().bool()
    mask[1:4, 1:4] = True
    return mask


@pytest.mark.parametrize("masks", [NO_MASKS, (block_mask(9), None, block_mask(6))])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2, 5, 9, 12, 40])
def test_attention_in_windows_with_caps_and_masks(window, cap, masks, monkeypatch):
    layer = Layer(0, "sliding_attention", SCALING, window, cap)
    compare(build_tensors(), 1e-12, layer, masks)
    use_plain_varlen(monkeypatch)  # one kernel for rows without masks
    compare(build_tensors(), 1e-12, layer, (*masks[:2], None))


def test_the_plan_of_a_row_is_built_once_for_all_layers(monkeypatch):
    use_plain_varlen(monkeypatch)
    built = record_calls(monkeypatch, attention, "VarlenPlan")
    packed = PackedAttention(SPANS)
    for index in range(3):
        packed(LAYER._replace(index=index), *build_tensors())
    assert len(built) == 1


def test_gradients_of_repeated_keys_are_summed_in_float32(monkeypatch):
    use_plain_varlen(monkeypatch)
    span = GroupSpan(0, 1, (1,) * 256)
    q, k, v = (torch.ones(1, 1, 257, 1).bfloat16().requires_grad_() for _ in range(3))
    PackedAttention([span])(LAYER, q, k, v).sum().backward()
    # The prompt's value has weight 1 in its own output and 1/2 in those of 256 completions; a sum
    # in bfloat16 would stop at 128.
    assert v.grad is not None
    assert v.grad[0, 0, 0, 0] == 129
    # The CPU's kernel has a wide sum of its own; a GPU's adds in the precision of the tensor.
    sums = record_calls(monkeypatch, Tensor, "index_add_")
    row: Any = torch.ones(3, 1, 1, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    gathered: Any = _Gather.apply(*row, torch.tensor([0] * 1000 + [1]))
    torch.cat(gathered).sum().backward()
    assert row.grad[..., 0].flatten().tolist() == [1, 1, 1000, 1, 1000, 1]
    assert [total.dtype for (total, *_), *_ in sums] == [torch.float32]


@pytest.mark.parametrize(
    ("device", "dtype", "has_varlen", "name"),
    [
        ("cpu", torch.float32, False, "PyTorch's flash kernels for CPUs"),
        ("meta", torch.float32, False, "PyTorch's, with masks"),
        ("cpu", torch.bfloat16, True, "FlashAttention, one call per layer"),
    ],
)
def test_the_kernels_are_named(device, dtype, has_varlen, name, monkeypatch):
    monkeypatch.setattr(kernels, "has_varlen", lambda query: has_varlen)
    assert kernels.describe(torch.device(device), dtype) == name


def test_a_fork_does_not_change_its_origin():
    state = LayerState()
    state.update_conv_state(torch.ones(1, 3, 2), 0, conv_kernel_size=4)
    before: Any = state.get_conv_state(0)
    assert before.tolist() == [[[0, 0, 1, 1]] * 3]
    fork = state.fork(2)
    inputs = fork.update_conv_state(torch.full((2, 3, 1), 5.0), 0, conv_kernel_size=4)
    assert inputs[1].tolist() == [[0, 0, 1, 1, 5]] * 3
    assert fork.tensors["conv", 0][1].tolist() == [[0, 1, 1, 5]] * 3
    assert state.get_conv_state(0) is before


def test_layers_of_attention_are_not_recurrent():
    policy = build_family_policy("gemma3")
    assert find_recurrent_layers(policy.model.get_decoder()) == []
