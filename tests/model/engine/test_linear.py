"""The fast layers, and those with weights prepared for a rollout, equal the plain layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gradients import relative_error
from jaxtyping import TypeCheckError
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from vlm_grpo.model.engine import rollout_weights as module
from vlm_grpo.model.engine.linear import is_adapted, is_fast, product, use_fast_linears
from vlm_grpo.model.engine.rollout_weights import rollout_weights

IN, OUT, RANK = 24, 40, 4
KINDS = ("full", "lora", "dora")
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


class Net(nn.Module):
    """Two layers, to a larger and to a smaller width, for products in both orders."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(IN, OUT, dtype=dtype)
        self.down = nn.Linear(OUT, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


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


def adapt(net: Any, targets: list[str], dtype: torch.dtype, **options: Any) -> Any:
    """Add adapters whose output is not zero."""
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=targets, **options)
    get_peft_model(net, config, autocast_adapter_dtype=dtype != torch.float64)
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
        if "magnitude" in name:
            nn.init.uniform_(weight, 0.5, 2)
    return net


def make_net(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    net = Net(dtype)
    if kind == "full":
        return net
    return adapt(net, ["up", "down"], dtype, use_dora=kind == "dora", **options)


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
    net = make_net(kind, dtype)
    before = {n: w.clone() for n, w in net.state_dict().items()}
    x = torch.randn(shape, dtype=dtype)
    plain = output_and_gradients(net, x)
    use_fast_linears(net)
    fast = output_and_gradients(net, x)
    assert is_fast(net.up)
    assert is_adapted(net.up) == (kind != "full")
    assert {name: fast[name].dtype for name in fast} == {name: plain[name].dtype for name in plain}
    for name, value in plain.items():
        assert relative_error(fast[name], value) < bound, name
    with torch.no_grad(), rollout_weights(net):
        assert relative_error(net(x), plain["output"]) < bound
    # The prepared weights are dropped.
    assert torch.equal(net(x), fast["output"])
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(net.state_dict()[n], w) for n, w in before.items())


def test_the_adapted_gradient_is_the_derivative() -> None:
    net = make_net("lora", torch.float64)
    use_fast_linears(net)
    weights = [p for p in net.parameters() if p.requires_grad]
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: net(x), (x, *weights))


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"init_lora_weights": "mica"}])
def test_other_kinds_of_adapters_are_not_replaced(config: dict) -> None:
    net = make_net("lora", **config)
    use_fast_linears(net)
    assert not is_fast(net.up)


def test_disabled_adapters_give_the_base_model_also_in_rollouts() -> None:
    net, x = make_net("lora"), torch.randn(2, IN)
    use_fast_linears(net)
    for layer in (net.up, net.down):
        layer.enable_adapters(False)
    expected = Net(torch.float32)(x)
    assert relative_error(net(x), expected) < 1e-6
    with torch.no_grad(), rollout_weights(net):
        assert relative_error(net(x), expected) < 1e-6


def test_tensors_that_contradict_the_annotated_shapes_are_refused() -> None:
    with pytest.raises(TypeCheckError, match="product"):
        product(torch.zeros(3, IN), torch.zeros(OUT, IN + 1))


def test_rollout_weights_follow_autocast() -> None:
    net = make_net("full")
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
    net = make_net("lora", dtype)
    use_fast_linears(net)
    x = torch.randn(6, IN, dtype=dtype)
    with torch.no_grad(), rollout_weights(net) as weights_are_copies:
        assert weights_are_copies == is_copied
        rollout = net(x)
        for layer in (net.up, net.down):
            used: Any = vars(layer)["forward"]
            assert (used.func is module._multiply) == is_copied  # noqa: SLF001
    assert relative_error(rollout, net(x)) < 1e-2  # 8 bits


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_factors_of_adapters_keep_their_address_and_follow_the_training(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A CUDA graph that is kept for the next rollout reads them where it found them."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net = make_net(kind, torch.bfloat16)
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


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the width of each product with reordered weights."""
    found: list[int] = []
    multiply = module.multiply_by_onednn

    def count(*arguments: Any) -> Tensor:
        output = multiply(*arguments)
        found.append(output.shape[-1])
        return output

    monkeypatch.setattr(module, "multiply_by_onednn", count)
    return found


ALL = ["q_proj", "k_proj", "v_proj"]


def make_attention(kind: str, dtype: torch.dtype, targets: list[str]) -> Attention:
    net = Attention(dtype)
    if kind != "full":
        adapt(net, targets, dtype, use_dora=kind == "dora")
    use_fast_linears(net)
    return net


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


@in_each_precision
@pytest.mark.parametrize("targets", [ALL, ["v_proj"]])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_read_the_same_input_are_multiplied_at_once(
    kind: str, targets: list[str], dtype: torch.dtype, bound: float, widths: list[int]
) -> None:
    net = make_attention(kind, dtype, targets)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((5, IN), (2, 3, IN))]
    expected = [net(x) for x in inputs]
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
    dtype: torch.dtype, bound: float, widths: list[int]
) -> None:
    net = make_attention("lora", dtype, ALL)
    x, other = torch.randn(2, 5, IN, dtype=dtype).unbind()
    expected = net(x, other)
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
    for output, number in zip(found, (0, 0, 2, 1), strict=True):
        assert relative_error(output, expected[number].detach()) < 1e-6


def test_neither_inputs_nor_outputs_are_kept() -> None:
    net = make_attention("full", torch.float32, [])
    with torch.no_grad(), rollout_weights(net):
        x = torch.randn(5, IN)
        kept = [weakref.ref(tensor) for tensor in (x, *net(x))]
        del x
        assert all(reference() is None for reference in kept)
    assert "forward" not in vars(net.q_proj)
