"""Fused RMS norms have equal values and gradients, and only where the formula is the same."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_prompt, noise_example, sample_groups, tiny_policy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from work_counts import Operations

from vlm_grpo.model.engine import forwards
from vlm_grpo.model.engine.forwards import Compiled, computed, is_fused, use_fused_layers


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "has_kernel", lambda hidden, weight: True)


def build(
    kind: type, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a norm of 16 channels, its fused copy and hidden states."""
    torch.manual_seed(0)
    plain = kind(16, eps=1e-3)
    nn.init.normal_(plain.weight, mean=1.0)
    plain = plain.to(device, dtype)
    fused = copy.deepcopy(plain)
    use_fused_layers(fused)
    assert is_fused(fused)
    return plain, fused, torch.randn(2, 5, 16).to(device, dtype)


def compute(norm: nn.Module, hidden: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the hidden states and of the weights."""
    hidden = hidden.clone().requires_grad_()
    output = norm(hidden)
    (output * torch.arange(16, device=hidden.device)).sum().backward()
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, norm.weight.grad]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2_5_VLRMSNorm, Qwen3VLTextRMSNorm])
def test_values_and_gradients_equal_those_of_transformers(kind, device):
    plain, fused, hidden = build(kind, device=device)
    bound = 1e-6 if device == "cpu" else 1e-5
    for found, expected in zip(compute(fused, hidden), compute(plain, hidden), strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    # In bfloat16 it is no further from the formula than transformers.
    plain, fused, hidden = build(kind, torch.bfloat16, device)
    wide, weight = hidden.double(), plain.weight.detach().double()  # pyright: ignore[reportCallIssue]
    exact = weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    errors = [(norm(hidden).double() - exact).abs().mean() for norm in (fused, plain)]
    assert 0 < errors[0] <= errors[1]


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kind", [Gemma3RMSNorm, Qwen3_5RMSNormGated, nn.LayerNorm, nn.RMSNorm])
def test_norms_of_another_formula_stay(kind):
    norm = kind(16)
    use_fused_layers(norm)
    assert type(norm) is kind


class GatedRMSNorm(LlamaRMSNorm):
    """A norm of the same formula, with an optional argument."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


@pytest.mark.usefixtures("_kernel")
def test_a_norm_with_another_argument_takes_it():
    plain, fused, hidden = build(GatedRMSNorm)
    gate = torch.rand_like(hidden)
    assert torch.equal(fused(hidden, gate), plain(hidden, gate))
    assert torch.equal(fused(hidden, gate=gate), plain(hidden, gate=gate))


def test_a_norm_outside_of_a_gpu_is_that_of_transformers():
    plain, fused, hidden = build(Qwen2_5_VLRMSNorm, torch.bfloat16)
    assert torch.equal(fused(hidden), plain(hidden))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert type(fused).__name__ == type(plain).__name__


@pytest.mark.parametrize(
    ("dtype", "has_kernel"), [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)]
)
def test_a_norm_on_a_gpu_is_one_kernel(dtype, has_kernel):
    norm = LlamaRMSNorm(16)
    use_fused_layers(norm)
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        norm.weight = nn.Parameter(torch.empty(16, dtype=dtype))
        hidden = torch.empty(4, 16, dtype=dtype)
        with Operations() as operations:
            output = norm(hidden)
    names = [name for name in operations.names if name != "device"]
    assert (names == ["_fused_rms_norm"]) == has_kernel
    assert (output.dtype, output.device.type) == (dtype, "cuda")
    assert not forwards.has_kernel(hidden, norm.weight.float().to(torch.float16))


def test_a_norm_is_known_whatever_the_default_precision():
    torch.set_default_dtype(torch.bfloat16)  # while a model is loaded
    try:
        assert forwards._can_fuse.__wrapped__(LlamaRMSNorm)  # noqa: SLF001
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotations_and_gates_of_a_policy_ask_the_compiler_on_a_gpu_only(family, monkeypatch):
    policy = tiny_policy(family)
    prompts = [make_prompt(policy, noise_example("0", [(56, 56)]))]
    calls = set()

    def record(compiled: Compiled) -> Any:
        calls.add(compiled.function.__name__)
        return compiled.function

    monkeypatch.setattr(Compiled, "compiled", property(record))
    expected = sample_groups(policy, prompts)
    assert not calls
    monkeypatch.setattr(forwards, "can_compile", lambda tensor: Compiled.mode == "compiled")
    assert sample_groups(policy, prompts) == expected
    rotations = {name for name in calls if name.startswith("apply_rotary")}
    assert calls == {"<lambda>", "_merge", *rotations}
    assert "apply_rotary_pos_emb" in rotations
    calls.clear()
    with computed("plain"):
        assert sample_groups(policy, prompts) == expected
    assert not calls


def test_a_function_that_cannot_be_compiled_runs_as_it_is_with_a_warning(monkeypatch, caplog):
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler\ndetails")

    monkeypatch.setattr(forwards, "can_compile", lambda tensor: Compiled.mode == "compiled")
    monkeypatch.setattr(Compiled, "mode", "compiled")
    monkeypatch.setattr(Compiled, "compiled", property(lambda self: fail))
    double = Compiled(lambda x: 2 * x)
    assert [float(double(torch.ones(()))) for _ in range(2)] == [2.0, 2.0]
    assert [record.message for record in caplog.records] == [
        "rotary embeddings and gates run as single operations from now on, which takes longer: "
        "torch.compile fails (RuntimeError: no compiler); TORCH_COMPILE_DISABLE=1 does not try"
    ]
    monkeypatch.setattr(Compiled, "mode", "compiled")
    with pytest.raises(TypeError):  # the function's own error is no reason to go on
        Compiled(lambda x: x + "a")(torch.ones(()))
    assert Compiled.mode == "compiled"
