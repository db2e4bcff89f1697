"""The fast layers equal the layers that they replace."""

from __future__ import annotations

import pytest
import torch
from gradients import relative_error
from jaxtyping import TypeCheckError
from small_nets import IN, KINDS, OUT, Net, make_adapted
from torch import Tensor, nn

from vlm_grpo.model.engine.cpu.onednn import product
from vlm_grpo.model.engine.linear import is_adapted, is_fast, use_fast_linears


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
    assert is_fast(net.up)
    assert is_adapted(net.up) == (kind != "full")
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
    assert not is_fast(net.up)


def test_disabled_adapters_give_the_base_model() -> None:
    net = make_adapted(torch.float32)
    use_fast_linears(net)
    x = torch.randn(2, IN)
    base = Net(torch.float32)
    for layer in (net.up, net.down):
        layer.enable_adapters(False)  # type: ignore[operator]
    assert relative_error(net(x), base(x)) < 1e-6


def test_tensors_that_contradict_the_annotated_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="product"):
        product(torch.zeros(3, IN), torch.zeros(OUT, IN + 1))
