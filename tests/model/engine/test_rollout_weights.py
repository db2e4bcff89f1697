"""Decoding with prepared weights gives the outputs of the layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gradients import relative_error
from peft import LoraConfig, get_peft_model
from small_nets import IN, KINDS, Net, make_adapted
from torch import Tensor, nn

from vlm_grpo.model.engine import rollout_weights as module
from vlm_grpo.model.engine.cpu import joined
from vlm_grpo.model.engine.linear import use_fast_linears
from vlm_grpo.model.engine.rollout_weights import rollout_weights


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_weights_equal_the_weights_and_are_dropped_after(
    dtype: torch.dtype, bound: float, kind: str
) -> None:
    net = make_adapted(dtype, use_dora=kind == "dora") if kind != "full" else Net(dtype)
    x = torch.randn(6, IN, dtype=dtype)
    expected = net(x).detach()
    use_fast_linears(net)
    before = {n: w.clone() for n, w in net.state_dict().items()}
    fast = net(x).detach()
    with torch.no_grad(), rollout_weights(net):
        rollout = net(x)
    assert relative_error(rollout, expected) < bound
    assert torch.equal(net(x), fast)
    assert all(torch.equal(net.state_dict()[n], w) for n, w in before.items())


def test_rollout_weights_follow_autocast() -> None:
    net = Net(torch.float32)
    use_fast_linears(net)
    x = torch.randn(6, IN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        with rollout_weights(net):
            rollout = net(x)
    assert rollout.dtype == expected.dtype == torch.bfloat16
    assert relative_error(rollout, expected) < 1e-2  # 8 bits


@pytest.mark.parametrize(
    ("dtype", "is_copied"), [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False)]
)
def test_only_float32_adapters_are_copied_without_onednn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_copied: bool
) -> None:
    """As on a GPU, where copies of all weights would double the model's memory."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net = make_adapted(dtype)
    use_fast_linears(net)
    x = torch.randn(6, IN, dtype=dtype)
    with torch.no_grad(), rollout_weights(net) as weights_are_copies:
        assert weights_are_copies == is_copied
        rollout = net(x)
        for layer in (net.up, net.down):
            product: Any = vars(layer)["forward"]
            assert (product.func is module._multiply) == is_copied  # noqa: SLF001
    assert relative_error(rollout, net(x)) < 1e-2  # 8 bits


@pytest.mark.parametrize("use_dora", [False, True])
def test_factors_of_adapters_keep_their_address_and_follow_the_training(
    monkeypatch: pytest.MonkeyPatch, use_dora: bool
) -> None:
    """A CUDA graph that is kept for the next rollout reads them where it found them."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net = make_adapted(torch.bfloat16, use_dora=use_dora)
    use_fast_linears(net)
    x = torch.randn(6, IN, dtype=torch.bfloat16)
    addresses = []
    for _ in range(2):
        with torch.no_grad(), rollout_weights(net):
            rollout = net(x)
            addresses.append([factor.data_ptr() for factor in vars(net.up)["rollout_factors"]])
        assert relative_error(rollout, net(x)) < 1e-2
        with torch.no_grad():
            for name, weight in net.named_parameters():
                if "lora_" in name:
                    weight.mul_(-2)
    assert addresses[0] == addresses[1]


HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
in_each_precision = pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float32, 1e-6),
        pytest.param(
            torch.bfloat16,
            2e-2,
            marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="oneDNN needs AVX-512 for bfloat16"),
        ),
    ],
)


class Attention(nn.Module):
    """Layers with the names of those that read the same input; one has no bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(IN, 16, dtype=dtype)
        self.k_proj = nn.Linear(IN, 8, dtype=dtype, bias=False)
        self.v_proj = nn.Linear(IN, 12, dtype=dtype)

    def forward(self, x: Tensor, other: Tensor | None = None) -> list[Tensor]:
        values = x if other is None else other
        return [self.q_proj(x), self.k_proj(values), self.v_proj(values)]


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the outputs of each product with reordered weights."""
    widths: list[int] = []
    multiply = joined.multiply_by_onednn

    def count(*arguments: Any) -> Tensor:
        output = multiply(*arguments)
        widths.append(output.shape[-1])
        return output

    monkeypatch.setattr(joined, "multiply_by_onednn", count)
    return widths


def make_attention(kind: str, dtype: torch.dtype, targets: list[str]) -> Attention:
    net = Attention(dtype)
    if kind != "full":
        config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_dora=kind == "dora")
        get_peft_model(net, config)  # type: ignore[arg-type]
        for name, weight in net.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                nn.init.uniform_(weight, 0.1, 0.5)
    use_fast_linears(net)
    return net


@in_each_precision
@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], ["v_proj"]])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_read_the_same_input_are_multiplied_at_once(
    kind: str,
    targets: list[str],
    dtype: torch.dtype,
    bound: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = make_attention(kind, dtype, targets)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((5, IN), (2, 3, IN))]
    expected = [net(x) for x in inputs]
    widths = count_products(monkeypatch)
    with torch.no_grad(), rollout_weights(net):
        found = [net(x) for x in inputs]
    factors = [4 * len(targets)] if kind != "full" and dtype == torch.bfloat16 else []
    assert widths == [*factors, 16 + 8 + 12] * 2
    for outputs, others in zip(found, expected, strict=True):
        assert [output.shape for output in outputs] == [output.shape for output in others]
        for output, other in zip(outputs, others, strict=True):
            assert relative_error(output, other.detach()) < bound


@in_each_precision
def test_layers_with_different_inputs_are_multiplied_one_by_one(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_attention("lora", dtype, ["q_proj", "k_proj", "v_proj"])
    x, other = torch.randn(2, 5, IN, dtype=dtype).unbind()
    expected = net(x, other)
    widths = count_products(monkeypatch)
    with torch.no_grad(), rollout_weights(net):
        found = [net(x, other), net(x, other)]
    if dtype == torch.bfloat16:  # the adapters are beside the weights
        one_by_one = [4, 16, 4, 8, 4, 12]
        assert widths == [3 * 4, 16 + 8 + 12, *one_by_one[2:], *one_by_one]
    else:
        assert widths == [16 + 8 + 12, 8, 12, 16, 8, 12]
    for outputs in found:
        for output, value in zip(outputs, expected, strict=True):
            assert relative_error(output, value.detach()) < bound


def test_a_layer_that_is_called_twice_with_an_input_is_multiplied_again() -> None:
    net = make_attention("full", torch.float32, [])
    x = torch.randn(5, IN)
    expected = net(x)
    with torch.no_grad(), rollout_weights(net):
        found = [net.q_proj(x), net.q_proj(x), net.v_proj(x), net.k_proj(x)]
    order = (0, 0, 2, 1)
    for output, number in zip(found, order, strict=True):
        assert relative_error(output, expected[number].detach()) < 1e-6


def test_neither_inputs_nor_outputs_are_kept() -> None:
    net = make_attention("full", torch.float32, [])
    with torch.no_grad(), rollout_weights(net):
        x = torch.randn(5, IN)
        kept = [weakref.ref(tensor) for tensor in (x, *net(x))]
        del x
        assert all(reference() is None for reference in kept)
    assert "forward" not in vars(net.q_proj)
