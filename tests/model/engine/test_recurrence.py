"""Recurrent layers behind a shared prompt compute what they do over whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_policies import build_family_policy
from float64_steps import use_float64_recurrence
from gradients import output_and_gradients, relative_error
from torch import Tensor

from vlm_grpo.model.engine.attention import LayerState, PackedAttention, find_recurrent_layers
from vlm_grpo.model.engine.kernels import GroupSpan

SPANS = [GroupSpan(0, 9, (4, 0, 7)), GroupSpan(20, 2, (1, 1)), GroupSpan(24, 6, ())]


def build_layer(name: str, monkeypatch: pytest.MonkeyPatch, shared: bool = True) -> Any:
    policy = build_family_policy(name, torch.float64, shared=shared)
    use_float64_recurrence(monkeypatch, policy.model)
    return find_recurrent_layers(policy.family.language_model(policy.model))[0]


def run_rows_alone(layer: Any, hidden: Tensor) -> Tensor:
    outputs = []
    for start, length, completions in SPANS:
        first, prompt = start + length, list(range(start, start + length))
        for number, count in enumerate((0, *completions)):
            rows = [*prompt, *range(first, first + count)]
            first += count
            outputs.append(layer(hidden[:, rows])[:, length if number else 0 :])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_a_packed_row_equals_whole_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build_layer(name, monkeypatch)
    torch.manual_seed(0)
    hidden = torch.randn(1, 30, 32, dtype=torch.float64).requires_grad_()
    weights = list(layer.parameters())
    attend: Any = PackedAttention(SPANS)
    found = output_and_gradients(lambda *t: layer(t[0], attend=attend), [hidden, *weights])
    expected = output_and_gradients(lambda *t: run_rows_alone(layer, t[0]), [hidden, *weights])
    # The gated norm of Qwen3.5 computes in float32, and its gradient is rounded to it.
    for value, exact in zip(found, expected, strict=True):
        assert relative_error(value, exact) < 1e-6


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_tokens_one_by_one_equal_a_whole_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build_layer(name, monkeypatch, shared=False)
    parameter = "cache_params" if name == "qwen3_5" else "past_key_values"
    torch.manual_seed(0)
    hidden = torch.randn(1, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        state = LayerState()
        outputs = [layer(hidden[:, :4], **{parameter: state})]
        cached = LayerState(
            {name: tensor.clone() for name, tensor in state.tensors.items()}, in_place=True
        )
        outputs += [layer(hidden[:, i : i + 1], **{parameter: cached}) for i in range(4, 9)]
        torch.testing.assert_close(torch.cat(outputs, 1), layer(hidden), rtol=0, atol=1e-12)


def test_a_fork_does_not_change_its_origin() -> None:
    state = LayerState()
    state.update_conv_state(torch.ones(1, 3, 2), 0, conv_kernel_size=4)
    before = state.get_conv_state(0)
    assert before is not None
    assert before.tolist() == [[[0, 0, 1, 1]] * 3]
    fork = state.fork(2)
    inputs = fork.update_conv_state(torch.full((2, 3, 1), 5.0), 0, conv_kernel_size=4)
    assert inputs[1].tolist() == [[0, 0, 1, 1, 5]] * 3
    forked = fork.get_conv_state(0)
    assert forked is not None
    assert forked[1].tolist() == [[0, 1, 1, 5]] * 3
    assert state.get_conv_state(0) is before


def test_layers_of_attention_are_not_recurrent() -> None:
    policy = build_family_policy("gemma3")
    assert find_recurrent_layers(policy.family.language_model(policy.model)) == []
