"""The fast layers equal the layers that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradients import relative_error
from jaxtyping import TypeCheckError
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from vlm_grpo.engine.linear import AdaptedLinear, Linear, product, rollout_weights, use_fast_linears

IN, OUT, RANK = 24, 40, 4
KINDS = ("full", "lora", "dora")


class Net(nn.Module):
    """Two layers, to a larger and to a smaller width, for products in both orders."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(IN, OUT, dtype=dtype)
        self.down = nn.Linear(OUT, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def make_adapted(dtype: torch.dtype, **config: Any) -> Net:
    net = Net(dtype)
    get_peft_model(
        net,  # type: ignore[arg-type]
        LoraConfig(r=RANK, lora_alpha=6, target_modules=["up", "down"], **config),
        autocast_adapter_dtype=dtype != torch.float64,
    )
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)  # initially 0, which would leave the output unchanged
        if "magnitude" in name:
            nn.init.uniform_(weight, 0.5, 2)
    return net


def output_and_gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of input and weights, by name."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    output = net(x)
    output.float().pow(2).sum().backward()
    assert x.grad is not None
    grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": x.grad, **grads}


# Sums of 40 products: float32 has 24 bits, bfloat16 8; float64 goes through the plain layer.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("shape", [(5, IN), (2, 7, IN)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_plain_layers(
    dtype: torch.dtype, bound: float, shape: tuple[int, ...], kind: str
) -> None:
    net = make_adapted(dtype, use_dora=kind == "dora") if kind != "full" else Net(dtype)
    names = list(net.state_dict())
    x = torch.randn(shape, dtype=dtype)
    plain = output_and_gradients(net, x)
    use_fast_linears(net)
    fast = output_and_gradients(net, x)
    assert isinstance(net.up, AdaptedLinear if kind != "full" else Linear)
    assert list(net.state_dict()) == names
    assert fast.keys() == plain.keys()
    assert {name: fast[name].dtype for name in fast} == {name: plain[name].dtype for name in plain}
    for name, value in plain.items():
        assert relative_error(fast[name], value) < bound, name


def test_the_adapted_gradient_is_the_derivative() -> None:
    net = make_adapted(torch.float64)
    use_fast_linears(net)
    weights = [p for p in net.parameters() if p.requires_grad]
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *weights))


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"init_lora_weights": "mica"}])
def test_other_kinds_of_adapters_are_not_replaced(config: dict) -> None:
    net = make_adapted(torch.float32, **config)
    use_fast_linears(net)
    assert not isinstance(net.up, AdaptedLinear)


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


def test_disabled_adapters_give_the_base_model() -> None:
    net = make_adapted(torch.float32)
    use_fast_linears(net)
    x = torch.randn(2, IN)
    base = Net(torch.float32)
    for layer in (net.up, net.down):
        layer.enable_adapters(False)  # type: ignore[operator]
    assert relative_error(net(x), base(x)) < 1e-6


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
            assert isinstance(layer, AdaptedLinear)
            assert layer.rollout_weight is None
            assert (layer.get_base_layer().rollout_weight is not None) == is_copied
    assert relative_error(rollout, net(x)) < 1e-2  # 8 bits


def test_tensors_that_contradict_the_annotated_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="product"):
        product(torch.zeros(3, IN), torch.zeros(OUT, IN + 1))


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
            assert isinstance(net.up, AdaptedLinear)
            rollout = net(x)
            assert net.up.rollout_factors is not None
            addresses.append([factor.data_ptr() for factor in net.up.rollout_factors])
        assert relative_error(rollout, net(x)) < 1e-2
        with torch.no_grad():
            for name, weight in net.named_parameters():
                if "lora_" in name:
                    weight.mul_(-2)
    assert addresses[0] == addresses[1]
