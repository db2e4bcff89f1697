"""Chunked log-probabilities equal the plain softmax, with their gradients."""

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


def make_inputs(kind: str = "trained") -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return a head, hidden states, their targets, none of them banned, and the positions."""
    torch.manual_seed(0)
    head: Any = nn.Linear(WIDTH, VOCABULARY, bias=kind == "biased", dtype=torch.float64)
    head.requires_grad_(kind != "frozen")
    if kind == "adapted":
        holder: Any = nn.Module()
        holder.lm_head = head
        get_peft_model(holder, LoraConfig(r=2, target_modules=["lm_head"]))
        head = holder.lm_head.double()
        nn.init.normal_(head.lora_B["default"].weight)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(10, VOCABULARY, (TOKENS,)), torch.arange(TOKENS) % 6


def score_plainly(head: nn.Module, hidden: Tensor, targets: Tensor, positions: Tensor) -> tuple:
    """Compute the definition on the full tokens × vocabulary tensor."""
    logits = head(hidden) / 0.7
    banned = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bool)
    banned[:, [3, 9]] = True
    banned[positions < 2, 5] = True
    logprobs = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
    terms = torch.where(banned, 0.0, logprobs.exp() * logprobs.masked_fill(banned, 0))
    return logprobs.gather(1, targets[:, None])[:, 0], -terms.sum(-1)


@pytest.mark.parametrize("chunk", [0, 1, 7, 100])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("kind", ["trained", "frozen", "biased", "adapted"])
def test_scores_and_gradients_equal_the_definition(kind, entropy, chunk):
    head, hidden, targets, positions = make_inputs(kind)
    inputs = hidden, targets, positions
    settings = ScoringSettings(DISTRIBUTION, chunk, entropy)
    coefficients = torch.randn(TOKENS, dtype=torch.float64)
    wanted = [hidden, *(weight for weight in head.parameters() if weight.requires_grad)]
    assert len(wanted) == {"frozen": 1, "trained": 2, "biased": 3, "adapted": 3}[kind]
    scores = score_tokens(head, *inputs, settings)
    with torch.no_grad():
        alone = score_tokens(head, *inputs, settings)
    expected = score_plainly(head, *inputs)
    for found in (scores, alone):
        assert found.logprobs.requires_grad == (found is scores)
        assert (found.entropies is not None) == entropy
        columns: Any = found.columns[: 1 + entropy]
        for values, exact in zip(columns, expected, strict=False):
            assert torch.allclose(values, exact, atol=1e-12)
    pairs: Any = (scores.logprobs, scores.entropies), expected
    sums = [(a * coefficients).sum() + (b.sum() if entropy else 0) for a, b in pairs]
    grads = [torch.autograd.grad(total, wanted) for total in sums]
    for grad, exact in zip(*grads, strict=True):
        assert torch.allclose(grad, exact, atol=1e-12)


@pytest.mark.parametrize("entropy", [True, False])
def test_greedy_scores_have_the_gradient_of_temperature_one(entropy):
    head, hidden, targets, positions = make_inputs("frozen")
    grads = []
    for temperature in (0.0, 1.0):
        settings = ScoringSettings(SamplingDistribution(temperature), 7, entropy)
        scores = score_tokens(head, hidden, targets, positions, settings)
        grads.append(torch.autograd.grad(scores.logprobs.sum(), hidden)[0])
    assert torch.equal(*grads)


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


def test_no_tensor_is_larger_than_a_chunk():
    head, hidden, targets, positions = make_inputs("frozen")
    with Recorded() as recorded:
        scores = score_tokens(head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 4))
        scores.logprobs.sum().backward()
    # A chunk has 4 × 40 logits, the hidden states 23 × 8; the plain form would have 23 × 40 logits.
    largest = max(output.numel() for output in recorded.outputs.values())
    assert largest <= max(4 * VOCABULARY, TOKENS * WIDTH, WIDTH * VOCABULARY)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_chunks_of_a_trained_head_share_one_gradient(entropy, monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_GRADIENTS", 5 * WIDTH)
    head, hidden, targets, positions = make_inputs()
    settings = ScoringSettings(DISTRIBUTION, 4, entropy)
    with Recorded(smallest=WIDTH * VOCABULARY) as recorded:
        scores = score_tokens(head, hidden, targets, positions, settings)
        scores.logprobs.sum().backward()
    assert len({head.weight.data_ptr(), *recorded.outputs}) == 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_only_a_gradient_that_is_wanted_costs_a_second_product(enabled, wanted):
    head, hidden, targets, positions = make_inputs("frozen")
    hidden.requires_grad_(wanted)
    with torch.set_grad_enabled(enabled), Recorded() as recorded:
        scores = score_tokens(head, hidden, targets, positions, ScoringSettings(DISTRIBUTION, 4))
    assert scores.logprobs.requires_grad == (enabled and wanted)
    assert recorded.products == 6 * (1 + (enabled and wanted))  # six chunks
