"""Chunked log-probabilities equal the plain softmax, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlm_grpo.model.engine import logprobs
from vlm_grpo.model.engine.logprobs import ScoringSettings, score_tokens
from vlm_grpo.model.engine.sampling import SamplingDistribution

TOKENS, WIDTH, VOCABULARY = 23, 8, 40
DISTRIBUTION = SamplingDistribution(temperature=0.7, banned=(3, 9), eos=(5,), min_new_tokens=2)


def make_inputs() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(10, VOCABULARY, (TOKENS,))  # none of the banned ones
    return head, hidden, targets, torch.arange(TOKENS) % 6


def score_plainly(head: nn.Module, hidden: Tensor, targets: Tensor, positions: Tensor) -> tuple:
    """Compute the definition on the full tokens × vocabulary tensor."""
    logits = head(hidden) / 0.7
    banned = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bool)
    banned[:, [3, 9]] = True
    banned[positions < 2, 5] = True
    logprobs = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
    terms = torch.where(banned, 0.0, logprobs.exp() * logprobs.masked_fill(banned, 0))
    return logprobs.gather(1, targets[:, None])[:, 0], -terms.sum(-1)


@pytest.mark.parametrize("entropy", [True, False])
def test_greedy_scores_have_the_gradient_of_temperature_one(entropy: bool) -> None:
    head, hidden, targets, positions = make_inputs()
    head.requires_grad_(False)
    grads = []
    for temperature in (0.0, 1.0):
        settings = ScoringSettings(SamplingDistribution(temperature), 7, entropy)
        scores = score_tokens(head, hidden, targets, positions, settings)
        grads.append(torch.autograd.grad(scores.logprobs.sum(), hidden)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize(("bias", "enabled"), [(True, True), (True, False), (False, False)])
def test_entropies_of_a_head_with_a_bias_or_without_gradient(bias: bool, enabled: bool) -> None:
    head, hidden, targets, positions = make_inputs()
    if bias:
        head.bias = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
    expected, expected_entropy = score_plainly(head, hidden, targets, positions)
    with torch.set_grad_enabled(enabled):
        found = score_tokens(
            head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 7, with_entropy=True)
        )
    assert found.entropies is not None
    assert found.entropies.requires_grad == enabled
    assert torch.allclose(found.logprobs, expected, atol=1e-12)
    assert torch.allclose(found.entropies, expected_entropy, atol=1e-12)


@pytest.mark.parametrize("chunk", [0, 1, 7, 100])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
def test_scores_and_gradients_equal_the_definition(chunk: int, frozen: bool, entropy: bool) -> None:
    head, hidden, targets, positions = make_inputs()
    head.requires_grad_(not frozen)
    coefficients = torch.randn(TOKENS, dtype=torch.float64)
    expected, expected_entropy = score_plainly(head, hidden, targets, positions)
    wanted = [hidden] if frozen else [hidden, head.weight]
    loss = (expected * coefficients).sum() + (expected_entropy.sum() if entropy else 0)
    expected_grads = torch.autograd.grad(loss, wanted)

    found = score_tokens(
        head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, chunk, entropy)
    )
    assert torch.allclose(found.logprobs, expected, atol=1e-12)
    loss = (found.logprobs * coefficients).sum()
    if entropy:
        assert found.entropies is not None
        assert torch.allclose(found.entropies, expected_entropy, atol=1e-12)
        loss = loss + found.entropies.sum()
    for grad, expected_grad in zip(torch.autograd.grad(loss, wanted), expected_grads, strict=True):
        assert torch.allclose(grad, expected_grad, atol=1e-12)


def test_an_adapter_on_the_head_is_trained() -> None:
    head, hidden, targets, positions = make_inputs()
    holder = nn.Module()
    holder.lm_head = head
    adapted = get_peft_model(holder, LoraConfig(r=2, target_modules=["lm_head"]))  # type: ignore[arg-type]
    layer: Any = adapted.base_model.model.lm_head  # type: ignore[union-attr]
    layer.double()
    nn.init.normal_(layer.lora_B["default"].weight)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    expected = torch.autograd.grad(
        score_plainly(layer, hidden, targets, positions)[0].sum(), weights
    )
    scores = score_tokens(layer, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 5))
    found = torch.autograd.grad(scores.logprobs.sum(), weights)
    for grad, wanted in zip(found, expected, strict=True):
        assert torch.allclose(grad, wanted, atol=1e-12)


class Recorded(TorchDispatchMode):
    """Records results of at least ``smallest`` numbers, and counts matrix products."""

    def __init__(self, smallest: int = 1) -> None:
        super().__init__()
        self.smallest = smallest
        self.outputs: dict[int, Tensor] = {}  # kept, so that no address is used again
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.smallest:
            self.outputs.setdefault(out.data_ptr(), out)
        return out


def test_no_tensor_is_larger_than_a_chunk() -> None:
    head, hidden, targets, positions = make_inputs()
    head.requires_grad_(False)
    with Recorded() as recorded:
        scores = score_tokens(head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 4))
        scores.logprobs.sum().backward()
    # A chunk has 4 × 40 logits, the hidden states 23 × 8; the plain form would have 23 × 40 logits.
    largest = max(output.numel() for output in recorded.outputs.values())
    assert largest <= max(4 * VOCABULARY, TOKENS * WIDTH, WIDTH * VOCABULARY)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_chunks_of_a_trained_head_share_one_gradient(
    entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_GRADIENTS", 5 * WIDTH)
    head, hidden, targets, positions = make_inputs()
    settings = ScoringSettings(DISTRIBUTION, 4, entropy)
    with Recorded(smallest=WIDTH * VOCABULARY) as recorded:
        scores = score_tokens(head, hidden, targets, positions, settings)
        scores.logprobs.sum().backward()
    assert len({head.weight.data_ptr(), *recorded.outputs}) == 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_only_a_gradient_that_is_wanted_costs_a_second_product(enabled: bool, wanted: bool) -> None:
    head, hidden, targets, positions = make_inputs()
    head.requires_grad_(False)
    hidden.requires_grad_(wanted)
    with torch.set_grad_enabled(enabled), Recorded() as recorded:
        scores = score_tokens(head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 4))
    assert scores.logprobs.requires_grad == (enabled and wanted)
    assert recorded.products == 6 * (1 + (enabled and wanted))  # six chunks
