"""Memory of a step on several devices, or with weights in main memory."""

from __future__ import annotations

from dataclasses import replace

from vlm_grpo.planning.memory import Memory, count_cast_bytes, count_mlp_casts
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.workload import Workload


def shard_memory(memory: Memory, model: ModelShape, devices: int) -> Memory:
    """Return the memory per device if FSDP2 shards the weights and streams the layers.

    Each device keeps a part of the weights, their gradients and the optimizer's moments. What is
    outside the language model's layers stays gathered; the layers are gathered for the rollout,
    and two of them at once in the update (docs/scaling.md has the formulas). Adapters are not
    sharded.

    Args:
        memory: the memory of the same step with replicated weights.
        model: the model's shape.
        devices: number of devices.
    """
    layers = model.text.layers * model.text.layer_weights
    outside = model.num_weights - layers
    changed = {
        "weights": model.weight_bytes * (outside + model.num_weights // devices),
        "update": memory.update + 2 * model.text.layer_weights * model.value_bytes,
    }
    if model.lora_rank:
        changed["weights"] += 4 * model.num_trained
    else:
        trained_outside = min(outside, model.num_trained)
        changed["optimizer"] = memory.optimizer // devices
        changed["reference"] = memory.reference // devices
        per_weight = model.trained_bytes
        gradients = per_weight * (trained_outside + model.num_trained // devices)
        accumulates = memory.first_gradients == memory.gradients
        first = gradients if accumulates else min(memory.first_gradients, gradients)
        changed |= {"gradients": gradients, "first_gradients": first}
    if model.precision == "autocast":  # layers are gathered in bfloat16 and hold no casts
        changed["update"] += 2 * outside
        casts = count_cast_bytes(model) * (model.checkpointing != "full")
        casts -= count_mlp_casts(model, model.text) * (model.checkpointing == "mlp")
        changed["activations"] = memory.activations - model.text.layers * casts
    else:
        changed["folded"] = memory.folded + layers * model.value_bytes
    return replace(memory, **changed)


def offload_memory(memory: Memory, model: ModelShape, work: Workload, devices: int) -> Memory:
    """Return the memory per device if FSDP2 keeps the shards of ``shard_memory`` in main memory.

    What is outside the layers stays gathered on the device, with its gradients. The shards are
    copied to the device once for the rollout, and in the update twice for each pass
    (docs/scaling.md has the formulas); gradients of full weights are copied back.

    Args:
        memory: the memory with sharded weights.
        model: the model's shape.
        work: the step's workload.
        devices: number of devices.
    """
    layers = model.text.layers * model.text.layer_weights
    outside = model.num_weights - layers
    passes = work.num_micro_batches * work.iterations
    shards = model.weight_bytes * (model.num_weights // devices)
    changed = {"weights": memory.weights - shards, "host": shards}
    changed["copied"] = model.weight_bytes * (2 * outside + (1 + 2 * passes) * layers) // devices
    if not model.lora_rank:
        per_weight = model.trained_bytes
        gradients = per_weight * (model.num_trained // devices)
        changed["host"] += memory.optimizer + memory.reference + gradients
        changed |= {"optimizer": 0, "reference": 0, "stepping": 0}
        changed["gradients"] = memory.gradients - gradients
        changed["first_gradients"] = min(memory.first_gradients, changed["gradients"])
        changed["copied"] += per_weight * (outside + passes * layers) // devices
    return replace(memory, **changed)
