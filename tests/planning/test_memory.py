"""Tests of the memory estimate against what policies save, step and cache."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch
from family_models import BUILDERS
from family_policies import POLICIES, build_batch, build_policy, build_prompt, move_to_meta
from small_shapes import SHAPE, WORK
from tiny_models import FAMILIES
from torch import Tensor
from torch.nn.functional import rms_norm
from work_counts import measure_saved_bytes

from vlm_grpo.config.optim import OptimizerName, OptimSettings
from vlm_grpo.config.policy import Checkpointing, PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.model.engine import forwards, kernels
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.packing import LOGIT_BYTES, ROUNDED_AT_ONCE
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning import memory as counts
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.memory import _count_encoding_bytes, _count_prefill_bytes, estimate_memory
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import ModelShape, Workload
from vlm_grpo.types import Prompt


class FusedNorm(torch.autograd.Function):
    """A norm that saves what a GPU's kernel saves."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        scales = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scales)
        return rms_norm(hidden, shape, weight, eps)


@cache
def measure(family: str, name: str, on_cpu: bool = True) -> ModelShape:
    policy, settings = build_policy(family, POLICIES[name])
    return measure_layers(read_model_shape(policy.model.config, settings), settings, on_cpu)


def measure_last(
    family: str,
    values: dict[str, Any],
    recomputed: Checkpointing = "none",
    depths: tuple[int, int] = (2, 3),
    part: str = "text",
    side: int = 112,
) -> tuple[int, Policy, Prompt]:
    """Return what the last layer of a part saves, exact to the byte, its policy and the prompt."""
    saved = []
    for depth in depths:
        policy, _ = build_policy(family, values, **{part: depth})
        enable_gradient_checkpointing(policy.model.train(), recomputed)
        prompt = build_prompt(policy, side)
        saved.append(measure_saved_bytes(policy, build_batch(prompt)))
    return saved[1] - saved[0], policy, prompt


def count_planned(shape: ModelShape, prompt: Prompt, part: Checkpointing = "none") -> int:
    """Return what a plan counts of a decoder layer for three completions."""
    rows = build_batch(prompt).num_tokens, len(prompt.token_ids), 3
    return shape.measured_layer.count_kept(part, *rows)


FEW, PARTS = Workload(4, 3, 20, 16, 10, 130, 1 << 20, 0), ("none", "mlp")
# Each family with each part, each policy with each part.
CASES = [
    (FAMILIES[(number + PARTS.index(part)) % 3], name, part)
    for (number, name), part in product(enumerate(POLICIES), PARTS)
]
FULL = [name for name in POLICIES if name.startswith("full")]


@pytest.mark.parametrize(
    ("family", "name", "recomputed"), [*CASES, ("qwen2_5_vl", "lora-bfloat16", "full")]
)
def test_a_decoder_layer_saves_what_a_plan_measures(family, name, recomputed):
    values = POLICIES[name]
    if "lora" not in values:
        values = values | {"freeze": ("vision", "projector")}
    saved, _, prompt = measure_last(family, values, recomputed)
    assert saved == count_planned(measure(family, name), prompt, recomputed)


def test_variants_of_lora_are_measured():
    values = {"dtype": "bfloat16", "lora": {"r": 4, "alpha": 8, "use_dora": True}}
    saved, policy, prompt = measure_last("qwen2_5_vl", values, side=224)
    settings = PolicySettings.model_validate(values)
    shape = measure_layers(read_model_shape(policy.model.config, settings), settings, True)
    assert saved == count_planned(shape, prompt)
    assert shape.num_trained == sum(weight.numel() for weight in policy.weights().values())
    base = replace(shape, num_trained=0, lora_rank=0)
    difference = estimate_memory(shape, FEW).weights - estimate_memory(base, FEW).weights
    assert difference == 4 * shape.num_trained


@pytest.mark.parametrize("recomputed", ["mlp", "full"])
def test_adapters_are_cast_for_the_whole_pass_also_where_layers_are_recomputed(recomputed):
    shape = replace(measure("qwen2_5_vl", "lora-bfloat16"), checkpointing=recomputed)
    plain = estimate_memory(replace(shape, lora_rank=0), FEW).activations
    layer = shape.measured_layer
    cast = {"full": layer.fixed, "mlp": layer.mlp_fixed}[recomputed]
    assert estimate_memory(shape, FEW).activations - plain == shape.text.layers * cast > 0
    assert shape.text.layers * layer.fixed == 2 * shape.num_trained


def test_a_decoder_layer_on_a_gpu_saves_what_a_plan_measures(monkeypatch):
    monkeypatch.setattr(forwards, "has_kernel", lambda hidden, weight: hidden.dtype == weight.dtype)
    monkeypatch.setattr(forwards, "rms_norm", FusedNorm.apply)
    monkeypatch.setattr(forwards, "can_compile", lambda tensor: tensor.device.type == "meta")
    monkeypatch.setattr(forwards.Compiled, "mode", "planned")
    monkeypatch.setattr(kernels, "has_varlen", lambda query: query.device.type == "meta")
    saved = {}
    for layers in (2, 3):
        policy, _ = build_policy("qwen2_5_vl", POLICIES["lora-bfloat16"], text=layers)
        move_to_meta(monkeypatch, policy, prompt := build_prompt(policy))
        saved[layers] = measure_saved_bytes(policy, build_batch(prompt))
    monkeypatch.undo()
    shape = measure("qwen2_5_vl", "lora-bfloat16", on_cpu=False)
    assert saved[3] - saved[2] == count_planned(shape, prompt)


@pytest.mark.parametrize(
    ("family", "name", "recomputed"),
    [(*pair, PARTS[number % 2]) for number, pair in enumerate(product(FAMILIES, FULL))],
)
def test_a_vision_block_saves_what_a_plan_measures(family, name, recomputed):
    depths = (1, 2) if family != "qwen3_vl" else (2, 3)  # deepstack taps blocks 0 and 1
    saved, _, prompt = measure_last(family, POLICIES[name], recomputed, depths, part="vision")
    block: Any = measure(family, name).block
    patches = len(prompt.vision["pixel_values"])
    planned = block.count_kept(recomputed, patches)
    if name == "full-bfloat16" and family != "qwen2_5_vl":
        # Fake tensors have the means and deviations of two layer norms in bfloat16.
        planned += patches * 4 * 2
    assert saved == planned


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("kind", ["full-float32", "full-no-masters", "lora-bfloat16"])
def test_the_state_of_an_optimizer_has_the_planned_bytes(name, kind):
    policy, _ = build_policy("qwen2_5_vl", POLICIES[kind])
    shape = measure("qwen2_5_vl", kind)
    trainable = policy.trainable_parameters()
    optimizer = build_optimizer(trainable, OptimSettings(name=name))
    for _, weight in trainable:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    held = (value.untyped_storage() for value in states if isinstance(value, Tensor))
    storages = {storage.data_ptr(): storage.nbytes() for storage in held}
    planned = shape.state_bytes[name]
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_weights_are_counted_exactly(family, name):
    policy, policy_settings = build_policy(family, POLICIES[name])
    shape = read_model_shape(policy.model.config, policy_settings)
    assert shape.num_trained == sum(weight.numel() for _, weight in policy.trainable_parameters())
    everything = sum(weight.numel() for weight in policy.model.parameters())
    assert shape.num_weights + (shape.num_trained if shape.lora_rank else 0) == everything
    engine: Any = policy.engine
    assert shape.trains_vision == engine.encoder.is_trained


def test_tied_weights_are_counted_once_and_norms_fused_where_the_kernel_has_their_formula():
    settings = load_settings("counting")
    model = load_model(settings).model
    shape = read_model_shape(model.config, settings.policy)
    assert model.config.tie_word_embeddings
    assert shape.num_weights == shape.num_trained == model.num_parameters()
    # Gemma 3 and Qwen 3.5 multiply by 1 + w, and Command A Vision has layer norms.
    for family in ("internvl", "gemma4", "gemma3", "qwen3_5", "cohere2_vision"):
        shape = read_model_shape(BUILDERS[family]()[0].config, PolicySettings())
        assert shape.text.fuses_norms == (family in ("internvl", "gemma4"))


# 64 queries of width 8 in float32 and bfloat16, 128 in float32 for each of 2 prompts and 6
# completions; 64 + 3 · 40 keys and values, of both query heads and, of width 4, of their own;
# float32 sums of one of them.
FLASH = 64 * 8 * (4 + 2) + 128 * 8 * 8 * 4 + 184 * (2 * 2 * 8 + 2 * 2 * 4 + 4 * 4) + 64 * 4 * 4


@pytest.mark.parametrize(
    ("checkpointing", "activations", "update"),
    [
        # Of two layers and three blocks, then the merger, and four values per token in float32.
        # 64 tokens, of which 40 are in prompts with 3 completions each, and 32 patches.
        # Short-lived: attention, more than 64 · (3 · 16 + 4 · 8) values of 2 bytes; gradients of
        # a layer.
        ("none", 2 * (640 + 100 + 40 * (1 + 3 * 3)) + 3 * (224 + 50), FLASH + 2 * 576),
        ("mlp", 2 * (1140 - 384 - 60) + 3 * (274 - 96 - 20), FLASH + 2 * 576 + 444),
        ("full", 2 * 2 * 64 + 3 * 32, FLASH + 2 * 576 + 1140),
    ],
)
def test_each_term_of_the_memory_has_its_bytes(checkpointing, activations, update):
    model = replace(SHAPE, checkpointing=checkpointing)
    memory = estimate_memory(model, WORK)
    expected = dict.fromkeys(vars(memory), 0) | {
        "weights": 2 * 3000,
        "optimizer": 11_600,
        "gradients": 2 * 2900,
        "first_gradients": 2 * 8 * 100,  # of the head: there is one micro-batch
        # Float32 pixel values of two steps, and of each step's images the decoded one.
        "inputs": 2 * 4 * 2 * 16 * 5 + 3 * 4 * 7,
        "cache": 2 * (20 + 3 * 5) * 2 * 2 * 4 * 2,
        "sampling": 6 * 100 * (2 + LOGIT_BYTES),
        "activations": activations + 3 * 32 * 4 * 4 + 4 * 64 * 8 * 4,
        "update": update,
        # A weight, its gradient and two moments in float32, and random bits.
        "stepping": 4 * 4 * 8 * 100 + 4 * ROUNDED_AT_ONCE,
    }
    assert vars(memory) == expected


def test_terms_that_other_settings_add_have_their_bytes():
    def changes(model: ModelShape, work: Workload = WORK, on_cpu: bool = False) -> dict[str, int]:
        plain, changed = vars(estimate_memory(SHAPE, WORK)), estimate_memory(model, work, on_cpu)
        return {k: v - plain[k] for k, v in vars(changed).items() if v != plain[k]}

    rest = replace(WORK, uses_reference=True, teacher_weights=70, iterations=2)
    first = 2 * 2900 - 2 * 8 * 100
    expected = {"reference": 2 * 2900, "teacher": 2 * 70, "first_gradients": first}
    assert changes(SHAPE, rest) == expected
    inputs = 2 * 4 * 2 * 16 * 5 + 3 * 4 * 7
    layer = 64 * (3 * 16 + 4 * 8) * 2 - FLASH
    on_cpu = {
        "libraries": counts.LIBRARIES[2],
        "features": inputs,
        "folded": 2 * 2500,
        "update": layer,
    }
    assert changes(SHAPE, on_cpu=True) == on_cpu
    # Two prompts of 16 / 4 image tokens of width 8; no gradient of the tower.
    frozen = replace(SHAPE, trains_vision=False, block=None)
    tower = 3 * (224 + 50) + 3 * 32 * 4 * 4
    assert changes(frozen) == {"features": 2 * 4 * 8 * 2, "activations": -tower}
    quantized = replace(SHAPE, quantized_weights=1000, quantized_bytes=520, largest_quantized=50)
    assert changes(quantized) == {"weights": 520 - 2 * 1000, "sampling": 100, "update": 100}
    # Two results of 5 tokens and 4 patches in each of 6 episodes: an image token, and 5 values of
    # each patch. The cache has six prompts with 15 tokens each.
    results = {"result_tokens": 5, "result_patches": 4, "result_image_tokens": 1}
    seen = replace(WORK, results=2, **results)
    memory, plain = estimate_memory(frozen, seen), estimate_memory(frozen, WORK)
    assert memory.features - plain.features == 6 * 2 * 1 * 8 * 2
    assert memory.inputs - plain.inputs == 6 * 2 * 4 * 5 * 4
    assert memory.cache == 6 * (20 + 5 + 2 * 5) * 2 * 2 * 4 * 2
    offloads = replace(SHAPE, offloads=True)
    activations = estimate_memory(SHAPE, WORK).activations
    moved = {"activations": 1140 - activations, "offloaded": activations}
    assert changes(offloads) == moved
    logits = 30 * 100 * 20 - (FLASH + 2 * 576)  # of all 30 tokens, which exceed those of a layer
    assert changes(SHAPE, replace(WORK, head_chunk_tokens=0)) == {"update": logits}


def test_attention_of_a_3b_model_has_the_workspace_of_its_kernel():
    """16 query heads of width 128 share two key heads; G 16, 512 tokens behind 1,336."""
    text = replace(SHAPE.text, heads=16, key_heads=2, query=2048, key=256)
    work = replace(
        WORK, num_prompts=1, num_generations=16, prompt_tokens=1336, completion_tokens=512
    )
    found = counts.count_flash_bytes(replace(SHAPE, text=text), work)
    assert found / 2**30 == pytest.approx(0.45, abs=0.03)  # the audit's figure, by hand


def test_each_pass_of_the_rollout_has_its_bytes():
    # 32 patches: 5 pixel values in float32, 10 widths and 2 of the MLP.
    assert _count_encoding_bytes(SHAPE, WORK) == 32 * (4 * 5 + (10 * 4 + 2 * 6) * 2)
    # 40 tokens: 5 widths and 3 of the MLP, then keys and values of two layers.
    assert _count_prefill_bytes(SHAPE, WORK) == 40 * ((5 * 8 + 3 * 16) * 2 + 2 * 2 * 4 * 2)
    few = replace(SHAPE, text=replace(SHAPE.text, vocabulary=1))
    decoding = counts._count_decoding_bytes(few, WORK)  # noqa: SLF001
    assert decoding == 6 * 2 * 25 * (4 * 4 + 2)
    gated = replace(SHAPE, vision=replace(SHAPE.vision, gated=True))
    assert _count_encoding_bytes(gated, WORK) == 32 * (4 * 5 + (10 * 4 + 3 * 6) * 2)
