"""The fast layers, and those with weights prepared for a rollout, equal the plain layers."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import output_and_gradients, relative_error
from jaxtyping import TypeCheckError
from peft import LoraConfig, get_peft_model
from recorded import Call, record_calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlm_grpo.model.engine import linear
from vlm_grpo.model.engine import rollout_weights as module
from vlm_grpo.model.engine.rollout_weights import rollout_weights

IN, RANK = 24, 4
SIBLINGS = ["q_proj", "k_proj", "v_proj"]
KINDS = ("full", "lora", "dora")
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


class Net(nn.Module):
    """Layers with the names of those that read the same input, to larger and to smaller widths, for
    products in both orders; some have no bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(IN, 32, dtype=dtype)
        self.k_proj = nn.Linear(IN, 8, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(IN, 12, dtype=dtype)
        self.down = nn.Linear(52, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        values = x if other is None else other
        parts = [self.q_proj(x), self.k_proj(values), self.v_proj(values)]
        return self.down(torch.tanh(torch.cat(parts, -1)))


def make_net(
    kind: str,
    dtype: torch.dtype = torch.float32,
    targets: Any = (*SIBLINGS, "down"),
    fast: bool = True,
    **options: Any,
) -> Any:
    """Build a network, whose adapters, if any, have outputs that are not zero."""
    net: Any = Net(dtype)
    if kind != "full":
        options["use_dora"] = kind == "dora"
        config = LoraConfig(r=RANK, lora_alpha=6, target_modules=list(targets), **options)
        get_peft_model(net, config, autocast_adapter_dtype=dtype != torch.float64)
        for name, weight in net.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
            if "magnitude" in name:
                nn.init.uniform_(weight, 0.5, 2)
    if fast:
        linear.use_fast_linears(net)
    return net


def compute(net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Return the output of ``run``, or of the network, and the gradients of input and weights."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    inputs = [x.detach().requires_grad_(), *weights]
    return output_and_gradients(lambda x, *_: (run or net)(x), inputs)


# Sums of 52 products: float32 has 24 bits, bfloat16 8; float64 goes through the plain layer.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("shape", [(5, IN), (2, 7, IN)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_plain_layers(dtype, bound, shape, kind):
    net = make_net(kind, dtype, fast=False)
    before = {n: w.clone() for n, w in net.state_dict().items()}
    x = torch.randn(shape, dtype=dtype)
    plain = compute(net, x)
    linear.use_fast_linears(net)
    fast = compute(net, x)
    assert linear.is_fast(net.down)
    assert linear.is_adapted(net.down) == (kind != "full")
    for found, expected in zip(fast, plain, strict=True):
        assert found.dtype == expected.dtype
        assert relative_error(found, expected) < bound
    with torch.no_grad(), rollout_weights(net):
        assert relative_error(net(x), plain[0]) < bound
    # The prepared weights are dropped.
    assert torch.equal(net(x), fast[0])
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(net.state_dict()[n], w) for n, w in before.items())


@pytest.mark.parametrize("scaling", [1.5, 1.7])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_factors_that_are_cast_together_equal_those_of_each_layer(kind, scaling):
    """The results are bit-identical, also if a layer is recomputed later or has no gradient."""
    net, x = make_net(kind, torch.bfloat16), torch.randn(6, IN).bfloat16()
    for layer in net.children():
        layer.scaling["default"] = scaling
    expected = compute(net, x)
    layers = linear.use_fast_linears(net)
    assert layers == list(net.children())

    def run(x: Tensor) -> Tensor:
        with linear.cast_together(layers):
            assert all("cast_factors" in vars(layer) for layer in layers)
            output: Any = checkpoint(net, x, use_reentrant=False)
        assert not any("cast_factors" in vars(layer) for layer in layers)
        return output

    assert all(map(torch.equal, compute(net, x, run), expected))
    # Of two layers of a shape, only the second has a gradient.
    other = make_net(kind, torch.bfloat16)
    with linear.cast_together([*layers, *linear.use_fast_linears(other)]):
        other.q_proj(x).float().sum().backward()
    assert all(p.grad is None for p in net.parameters())
    named = other.named_parameters()
    assert {n.split(".")[0] for n, p in named if p.grad is not None} == {"q_proj"}


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"init_lora_weights": "mica"}])
def test_other_kinds_of_adapters_are_not_replaced(config):
    assert not linear.is_fast(make_net("lora", **config).down)


def test_disabled_adapters_give_the_base_model_also_in_rollouts():
    net, x = make_net("lora"), torch.randn(2, IN)
    for layer in net.children():
        layer.enable_adapters(False)
    expected = Net(torch.float32)(x)
    assert relative_error(net(x), expected) < 1e-6
    with torch.no_grad(), rollout_weights(net):
        assert relative_error(net(x), expected) < 1e-6


def test_tensors_that_contradict_the_annotated_shapes_are_refused():
    with pytest.raises(TypeCheckError, match="product"):
        linear.product(torch.zeros(3, IN), torch.zeros(8, IN + 1))


def test_rollout_weights_follow_autocast():
    net, x = make_net("full"), torch.randn(6, IN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        with rollout_weights(net):
            rollout = net(x)
    assert rollout.dtype == expected.dtype == torch.bfloat16
    assert relative_error(rollout, expected) < 1e-2  # 8 bits


@pytest.mark.parametrize(
    ("kind", "dtype", "is_copied"),
    [
        ("lora", torch.float64, False),
        ("lora", torch.float32, True),
        ("lora", torch.bfloat16, False),
        ("dora", torch.bfloat16, False),
    ],
)
def test_without_onednn_only_float32_adapters_are_copied_and_others_follow_the_training(
    kind, dtype, is_copied, monkeypatch
):
    """As on a GPU, where copies of all weights would double the model's memory, and a CUDA graph
    that is kept for the next rollout reads the factors of adapters where it found them."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net, x = make_net(kind, dtype), torch.randn(6, IN, dtype=dtype)
    addresses = []
    for _ in range(2):
        with torch.no_grad(), rollout_weights(net) as weights_are_copies:
            assert weights_are_copies == is_copied
            rollout = net(x)
            for layer in net.children():
                used: Any = vars(layer)["forward"].func
                storages = (w.untyped_storage() for w in (used.weight, layer.base_layer.weight))
                assert (len({storage.data_ptr() for storage in storages}) == 2) == is_copied
            kept = vars(net.down).get("rollout_factors", {}).values()
            addresses.append([p.data_ptr() for parts in kept for p in parts if p is not None])
        assert relative_error(rollout, net(x)) < 1e-2  # 8 bits
        with torch.no_grad():
            for name, weight in net.named_parameters():
                if "lora_" in name:
                    weight.mul_(-2)
    assert addresses[0] == addresses[1]
    assert bool(addresses[0]) == (not is_copied)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_frozen_siblings_move_together_once_and_are_multiplied_at_once(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    net, x = make_net(kind, torch.bfloat16), torch.randn(6, IN).bfloat16()
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    bases = [getattr(net, name).base_layer for name in SIBLINGS]
    addresses = []
    for _ in range(2):
        expected = net(x)
        with monkeypatch.context() as patch, torch.no_grad(), rollout_weights(net):
            products = record_calls(patch, nn.functional, "linear")
            found = net(x)
        # The adapters have 3 · 4 and 4 rows beside them, in multiples of 8.
        assert [len(call.arguments[1]) for call in products] == [32 + 8 + 12 + 16, IN + 8]
        assert relative_error(found, expected.detach()) < 2e-2
        addresses.append([base.weight.data_ptr() for base in bases])
    assert addresses[0] == addresses[1]
    assert len({base.weight.untyped_storage().data_ptr() for base in bases}) == 1
    assert all(torch.equal(weight, before[name]) for name, weight in net.state_dict().items())
    other = make_net(kind, torch.bfloat16)
    with torch.no_grad(), rollout_weights(other, may_move=False):
        assert relative_error(other(x), found) < 2e-2
    weights = [getattr(other, name).base_layer.weight for name in SIBLINGS]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 3


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return a list that receives the products with reordered weights."""
    return record_calls(monkeypatch, module, "multiply_by_onednn")


def get_widths(products: list[Call]) -> list[int]:
    return [call.result.shape[-1] for call in products]


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
@pytest.mark.parametrize("targets", [SIBLINGS, ["v_proj"]])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_same_input_are_multiplied_at_once(kind, targets, dtype, bound, products):
    net = make_net(kind, dtype, targets)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((5, IN), (2, 3, IN))]
    expected = [net(x) for x in inputs]
    with torch.no_grad(), rollout_weights(net):
        found = [net(x) for x in inputs]
    factors = [RANK * len(targets)] if kind != "full" and dtype == torch.bfloat16 else []
    assert get_widths(products) == [*factors, 32 + 8 + 12, IN] * 2
    for output, other in zip(found, expected, strict=True):
        assert output.shape == other.shape
        assert relative_error(output, other.detach()) < bound


@in_each_precision
def test_layers_with_different_inputs_are_multiplied_one_by_one(dtype, bound, products):
    net = make_net("lora", dtype, SIBLINGS)
    x, other = torch.randn(2, 5, IN, dtype=dtype).unbind()
    expected = net(x, other)
    with torch.no_grad(), rollout_weights(net):
        found = [net(x, other), net(x, other)]
    # In bfloat16 the adapters are beside the weights.
    factor, factors = ([], []) if dtype == torch.float32 else ([RANK], [3 * RANK])
    others = [*factor, 8, *factor, 12, IN]
    assert get_widths(products) == [*factors, 32 + 8 + 12, *others, *factor, 32, *others]
    for output in found:
        assert relative_error(output, expected.detach()) < bound


def test_a_layer_that_is_called_twice_with_an_input_is_multiplied_again():
    net, x = make_net("full"), torch.randn(5, IN)
    names = ["q_proj", "q_proj", "v_proj", "k_proj"]
    expected = [getattr(net, name)(x) for name in names]
    with torch.no_grad(), rollout_weights(net):
        found = [getattr(net, name)(x) for name in names]
    for output, other in zip(found, expected, strict=True):
        assert relative_error(output, other.detach()) < 1e-6


def test_neither_inputs_nor_outputs_are_kept():
    net = make_net("full")
    with torch.no_grad(), rollout_weights(net):
        x = torch.randn(5, IN)
        outputs = [getattr(net, name)(x) for name in SIBLINGS]
        kept = [weakref.ref(tensor) for tensor in (x, *outputs)]
        del x, outputs
        assert all(reference() is None for reference in kept)
    assert "forward" not in vars(net.q_proj)
