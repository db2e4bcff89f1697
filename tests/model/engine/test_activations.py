"""Recomputed and offloaded activations give the same gradients and leave less memory in use."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_models import BUILDERS
from family_policies import build_batch, read_gradient
from gradients import relative_distance
from tiny_models import add_lora, make_prompt, noise_example, tiny_model, tiny_policy
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine import activations
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing, offload_activations
from vlm_grpo.model.engine.forwards import has_forward

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("family", "part", "lora"),
    [
        *(("qwen2_5_vl", part, part == "mlp") for part in ("none", "mlp", "full")),
        *((family, "none", True) for family in ("qwen2_vl", "qwen3_vl")),
    ],
)
def test_offloaded_activations_give_equal_gradients(family, part, lora, device):
    grads = []
    for min_bytes in (2**40, 1):
        policy = tiny_policy(family, dtype=torch.float64 if device == "cpu" else torch.float32)
        enable_gradient_checkpointing(policy.model, part)
        if lora:
            add_lora(policy, ["q_proj", "down_proj"])
        prompt = make_prompt(policy, noise_example("a", [(112, 84)]))
        policy.model.train().to(device)
        with offload_activations(policy.model, torch.device(device), min_bytes):
            logprobs = policy.score(build_batch(prompt)).logprobs
        logprobs.sum().backward()
        grads.append(read_gradient(policy))
    # Sums on a GPU have no fixed order.
    assert relative_distance(*grads) <= (0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize(("min_bytes", "is_moved"), [(1, True), (4096, True), (4097, False)])
def test_large_activations_are_freed_and_copied_once_and_weights_stay(
    min_bytes, is_moved, monkeypatch
):
    moved: list[StorageWeakRef] = []

    def record(pin_memory: bool) -> Any:
        assert pin_memory
        hooks = save_on_cpu(pin_memory=True)

        def pack(tensor: Tensor) -> Any:
            moved.append(StorageWeakRef(tensor.untyped_storage()))
            return hooks.pack_hook(tensor)

        return SimpleNamespace(pack_hook=pack, unpack_hook=hooks.unpack_hook)

    monkeypatch.setattr(activations, "save_on_cpu", record)
    # Layers that save 4 KB each: the input of a product, and the output of tanh.
    layers = (layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.Tanh()))
    inputs = torch.randn(128, 8)
    with offload_activations(model := nn.Sequential(*layers), CPU, min_bytes):
        output = model(inputs)
    # The first input of tanh and its 20 outputs, each the next input.
    freed = [False, *[True] * 19, False]
    assert [storage.expired() for storage in moved] == (freed if is_moved else [])
    output.sum().backward()


def test_views_of_one_tensor_and_its_later_values_are_kept_apart():
    weight: Any = torch.ones(4, requires_grad=True)
    memory = torch.arange(8.0)
    first, second = memory.split(4)
    with offload_activations(nn.Linear(1, 1), CPU, 1):
        loss = (weight * first).sum() + 10 * (weight * second).sum()
        memory.add_(100)
        loss = loss + 100 * (weight * first).sum()
    loss.backward()
    # 0, 1, 2, 3; 4, 5, 6, 7; and 100, 101, 102, 103.
    assert weight.grad.tolist() == [i + 10 * (4 + i) + 100 * (100 + i) for i in range(4)]


def test_the_boolean_values_of_checkpointing_still_work():
    for value, name in (("true", "full"), ("false", "none"), ("mlp", "mlp")):
        settings = load_settings("counting", [f"policy.gradient_checkpointing={value}"])
        assert settings.policy.gradient_checkpointing == name
    with pytest.raises(UserError, match="gradient_checkpointing"):
        load_settings("counting", ["policy.gradient_checkpointing=1"])


def test_feed_forward_layers_of_known_names_are_recomputed():
    with pytest.raises(UserError, match="layers are not known: use full"):
        enable_gradient_checkpointing(nn.Linear(1, 1), "mlp")
    model, _ = BUILDERS["lfm2_vl"]()
    kinds = [type(layer.feed_forward) for layer in model.get_decoder().layers]
    enable_gradient_checkpointing(model, "mlp")
    for layer, kind in zip(model.get_decoder().layers, kinds, strict=True):
        assert has_forward(layer.feed_forward, activations._recompute)  # noqa: SLF001
        assert isinstance(layer.feed_forward, kind)


def test_a_copy_of_a_recomputed_module_uses_its_own_weights():
    model, _ = tiny_model("qwen2_vl")
    enable_gradient_checkpointing(model, "mlp")
    mlp = model.train().model.language_model.layers[0].mlp
    twin = copy.deepcopy(mlp)
    nn.init.zeros_(twin.down_proj.weight)
    assert not twin(torch.ones(1, 64)).any()
    assert mlp(torch.ones(1, 64)).any()
