"""Tests of the memory estimate against autograd's saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from tiny_policies import POLICIES, build_batch, build_policy, build_prompt
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm
from work_counts import measure_saved_bytes

from vlm_grpo.config.optim import OptimizerName, OptimSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.model.engine import norms, varlen
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.families import ImageFeatures
from vlm_grpo.planning.memory import (
    count_bytes_per_patch,
    count_bytes_per_prompt_token,
    count_bytes_per_token,
    count_cache_bytes,
    count_cast_bytes,
    count_fused_norm_bytes,
    count_mlp_bytes,
    estimate_memory,
)
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.workload import Workload


class FusedNorm(torch.autograd.Function):
    """A norm that saves what a GPU's kernel saves."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        scales = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scales)
        return rms_norm(hidden, shape, weight, eps)


@pytest.fixture
def fuse_norms(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let norms save what they save on a GPU."""

    def fuse() -> None:
        monkeypatch.setattr(
            norms, "has_kernel", lambda hidden, weight: hidden.dtype == weight.dtype
        )
        monkeypatch.setattr(norms, "rms_norm", FusedNorm.apply)

    return fuse


CASES = [("none", False), ("mlp", False), ("none", True)]
"""What is recomputed, and whether norms are fused."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("recomputed", "fused"), CASES)
def test_the_formula_of_a_decoder_layer_is_exact(
    family: str, name: str, recomputed: Any, fused: bool, fuse_norms: Callable[[], None]
) -> None:
    if fused:
        fuse_norms()
    values = POLICIES[name]
    if "lora" not in values:
        values = values | {"freeze": ("vision", "projector")}
    saved = {}
    for layers in (2, 3):
        policy, policy_settings = build_policy(family, values, text=layers)
        enable_gradient_checkpointing(policy.model.train(), recomputed)
        prompt = build_prompt(policy)
        batch = build_batch(prompt)
        saved[layers] = measure_saved_bytes(policy, batch)
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    # The difference is the third layer's share, exact to the byte.
    expected = batch.num_tokens * count_bytes_per_token(shape, True) + count_cast_bytes(shape)
    expected += len(prompt.token_ids) * count_bytes_per_prompt_token(shape, 3, on_cpu=True)
    if recomputed == "mlp":
        expected -= count_mlp_bytes(shape, shape.text, batch.num_tokens)
    if fused:
        expected -= batch.num_tokens * count_fused_norm_bytes(shape)
    assert saved[3] - saved[2] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_variants_of_lora_are_counted(variant: dict[str, Any], dtype: str) -> None:
    values = {"dtype": dtype, "lora": {"r": 4, "alpha": 8, **variant}}
    saved = {}
    for layers in (2, 3):
        policy, policy_settings = build_policy("qwen2_5_vl", values, text=layers)
        prompt = build_prompt(policy, 224)
        batch = build_batch(prompt)
        saved[layers] = measure_saved_bytes(policy, batch)
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    expected = batch.num_tokens * count_bytes_per_token(shape, True) + count_cast_bytes(shape)
    expected += len(prompt.token_ids) * count_bytes_per_prompt_token(shape, 3, on_cpu=True)
    # DoRA's factors and norms, which do not depend on the tokens, are not counted.
    bound = 0.05 if shape.has_norms else 0
    assert saved[3] - saved[2] == pytest.approx(expected, rel=bound, abs=0)
    added = [weight for name, weight in policy.weights().items() if "lora_" in name]
    assert shape.num_trained == sum(weight.numel() for weight in added)
    kept = sum(weight.numel() for weight in policy.weights().values()) - shape.num_trained
    assert shape.num_initial == kept
    base = replace(shape, num_trained=0, num_initial=0, lora_rank=0)
    work = Workload(4, 3, 20, 16, 10, 130, 1 << 20, 0)
    difference = estimate_memory(shape, work).weights - estimate_memory(base, work).weights
    assert difference == 4 * (shape.num_trained + kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_keeps_its_input_and_a_scale(dtype: torch.dtype) -> None:
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode(), torch.device("cuda"):
        weight = torch.empty(64, dtype=dtype)
        for norm in (rms_norm, FusedNorm.apply):
            hidden = torch.empty(10, 64, dtype=dtype, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
                kept = norm(hidden, (64,), weight, 1e-6)
            assert kept.shape == hidden.shape
            # 10 rows, with a scale in float32 each; and the weights.
            assert sum(saved.values()) == 10 * (64 * dtype.itemsize + 4) + 64 * dtype.itemsize
            saved.clear()


def test_the_formula_of_a_decoder_layer_is_exact_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, fuse_norms: Callable[[], None]
) -> None:
    fuse_norms()
    monkeypatch.setattr(varlen, "has_varlen", lambda query: query.device.type == "meta")
    saved = {}
    for layers in (2, 3):
        policy, policy_settings = build_policy("qwen2_5_vl", POLICIES["lora-bfloat16"], text=layers)
        prompt = build_prompt(policy)
        engine: Any = policy.engine
        prefixes = engine.build_prefixes([prompt], policy.counters)
        policy.model.to("meta")  # has the shapes of a GPU's kernels, but no values
        features = tuple(ImageFeatures(f.embeds.to("meta")) for f in prefixes[0].features)
        prefixes = [replace(prefixes[0], features=features)]
        monkeypatch.setattr(engine, "build_prefixes", lambda *_, p=prefixes: p)
        saved[layers] = measure_saved_bytes(policy, build_batch(prompt))
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    tokens, prompt_tokens = build_batch(prompt).num_tokens, len(prompt.token_ids)
    expected = tokens * count_bytes_per_token(shape) + count_cast_bytes(shape)
    expected += prompt_tokens * count_bytes_per_prompt_token(shape, 3)
    expected += 16  # the kernel's random state
    assert saved[3] - saved[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("full")])
@pytest.mark.parametrize(("recomputed", "fused"), CASES)
def test_the_formula_of_a_vision_block_is_exact(
    family: str, name: str, recomputed: Any, fused: bool, fuse_norms: Callable[[], None]
) -> None:
    if fused:
        fuse_norms()
    saved = {}
    depths = (1, 2) if family != "qwen3_vl" else (2, 3)  # deepstack taps blocks 0 and 1
    for depth in depths:
        policy, policy_settings = build_policy(family, POLICIES[name], vision=depth)
        enable_gradient_checkpointing(policy.model.train(), recomputed)
        prompt = build_prompt(policy)
        saved[depth] = measure_saved_bytes(policy, build_batch(prompt))
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    casts = 2 * shape.vision.layer_weights if name == "full-bfloat16" else 0
    patches = len(prompt.vision["pixel_values"])
    expected = patches * count_bytes_per_patch(shape, on_cpu=not fused) + casts
    if name == "full-no-masters" and not shape.vision.gated:
        # A CPU keeps the means and deviations of two layer norms in bfloat16, a GPU in float32.
        expected -= patches * 4 * 2
    if recomputed == "mlp":
        expected -= count_mlp_bytes(shape, shape.vision, patches)
    assert saved[depths[1]] - saved[depths[0]] == expected


def test_the_cache_holds_keys_and_values_of_all_tokens() -> None:
    policy, policy_settings = build_policy("qwen2_5_vl", POLICIES["full-float32"])
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    work = Workload(4, 3, 20, 16, 10, 130, 1 << 20, 0)
    # Two prompts of 20 + 3 · 10 tokens fit into 130 tokens.
    assert work.concurrent_prompts == 2
    # 3 layers, keys and values, 2 key heads of 16, 4 bytes.
    assert count_cache_bytes(shape, work) == 2 * 50 * 3 * 2 * 32 * 4


def test_settings_that_save_memory_lower_the_estimate() -> None:
    policy = load_settings("counting_qwen2_vl_2b", ["data.train=x", "data.eval=y"]).policy
    model, _ = tiny_model("qwen2_5_vl")
    work = Workload(16, 8, 400, 1200, 64, 1 << 16, 1 << 14, 1024)

    def estimate(**changes: Any) -> Any:
        shape, _ = read_model_shape(model.config, policy.model_copy(update=changes))
        return estimate_memory(shape, work)

    plain = estimate(gradient_checkpointing="none")
    full = estimate(gradient_checkpointing="full")
    assert full.activations < plain.activations / 2
    mlp = estimate(gradient_checkpointing="mlp")
    assert full.activations < mlp.activations < plain.activations
    lora = load_settings("ocr_qwen3_vl_4b", ["data.train=x", "data.eval=y"]).policy.lora
    assert estimate(lora=lora).optimizer < plain.optimizer
    float32 = estimate(dtype="float32", gradient_checkpointing="none")
    assert float32.activations > plain.activations


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("kind", ["full-float32", "full-no-masters", "lora-bfloat16"])
def test_the_state_of_an_optimizer_has_the_planned_bytes(name: Any, kind: str) -> None:
    policy, policy_settings = build_policy("qwen2_5_vl", POLICIES[kind])
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    trainable = policy.trainable_parameters()
    optimizer = build_optimizer(trainable, OptimSettings(name=name))
    for _, weight in trainable:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    planned = shape.count_state_bytes(name)
    # Counters that are no tensors, and tables of codes that all weights share: a few kilobytes.
    scalars = 16 * len(trainable)
    tables = 2 * 256 * 4 if "8bit" in name else 0
    assert -scalars <= sum(storages.values()) - planned <= scalars + tables
    gradients = sum(weight.grad.nbytes for _, weight in trainable if weight.grad is not None)
    work = Workload(16, 8, 400, 1200, 64, 1 << 16, 400, 1024, optimizer=name)
    memory = estimate_memory(shape, work)
    assert (memory.gradients, memory.optimizer) == (gradients, planned)
    is_large = kind == "full-no-masters" or name in ("adafactor", "muon")
    assert (memory.stepping > 0) == (is_large and not shape.lora_rank)
