"""Memory of a step in bytes, from shapes only.

The tensors that a layer saves for its backward pass are counted operation by operation in the
models' code and in ours (``engine/attention.py``), and the tests compare the counts with autograd.
Let h be the hidden width, q and k the total widths of queries and keys, m the intermediate width,
a the number of heads and r the rank. In one decoder layer, one token saves this number of bytes:

=============  ===============================================================================
LoRA, float32  4 · (4h + 3q + 2k + 4m + 7r + a + 2)
full, float32  4 · (6h + 3q + 2k + 4m + a + 2)
LoRA, bf16     4 · (2h + a + 2) + 2 · (2h + 3q + 2k + 4m + 7r), and a cast of each adapter
full, bf16     4 · (4h + a + 2) + 2 · (5h + 3q + 2k + 4m), and a cast of each linear weight
no masters     4 · (2h + a + 2) + 2 · (4h + 3q + 2k + 4m), with weights in bfloat16
=============  ===============================================================================

Each of them includes two residual streams and their normalized values (h each, and two more if the
weight of a norm is trained); queries, the attention output and the output projection's input (q
each); keys and values (k each); gate, its activation, up and their product (m each). A norm on
queries and keys adds q + k. The rest depends on the kernel of attention (``engine/varlen.py``,
``engine/kernels.py``), none of which saves a mask:

* half precision on a GPU: the output projection's input is the attention output (q less), and the
  keys and values of a prompt are saved once more for each of its completions (2k).
* a GPU's norms (``engine/norms.py``) keep their inputs in the inputs' precision and no normalized
  values before their product with the weights.
* float32 on the CPU: if query heads share key heads, a prompt token also saves the repeated keys
  and values (2q).

A peak adds short-lived tensors: the temporaries of one layer or the logits of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlm_grpo.model.engine.limits import ENCODER_PATCHES, LOGIT_BYTES, RECENT_IMAGES
from vlm_grpo.planning.shape import ModelShape, TextShape, VisionShape
from vlm_grpo.planning.workload import Workload

LINEAR_MODULES = 7  # of a decoder layer
LIBRARIES = {"float32": 60_000_000, "bfloat16": 120_000_000}
"""Bytes that libraries use on a CPU, independent of the model: code, buffers, and in bfloat16 the
kernels that oneDNN compiles for every shape. Fitted to ``perf/plan_accuracy.py``."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        gradients: gradients of the trained weights, at the end of the backward pass.
        first_gradients: those that exist while all activations are still saved: with several
            micro-batches all, with one those of the output head.
        libraries: memory of libraries on a CPU, in addition to tensors.
        inputs: pixel values and decoded images; on a machine with a GPU, in its main memory.
        folded: repacked or merged copies of weights, which speed up decoding.
        copied: bytes that it copies between main memory and the device in a step.
    """

    weights: int
    optimizer: int
    reference: int
    gradients: int
    first_gradients: int
    libraries: int
    inputs: int
    features: int
    folded: int
    cache: int
    sampling: int
    activations: int
    update: int
    stepping: int = 0
    offloaded: int = 0
    host: int = 0
    copied: int = 0
    teacher: int = 0
    server: int = 0
    resting: int = 0

    @property
    def persistent(self) -> int:
        """Memory held throughout the step."""
        states = self.weights + self.optimizer + self.reference + self.teacher
        return states + self.features + self.libraries

    @property
    def rollout(self) -> int:
        """Peak while sampling."""
        return self.persistent + self.folded + self.cache + self.sampling + self.server

    @property
    def backward(self) -> int:
        """Peak in the update, in which gradients replace the activations layer by layer."""
        layers = max(self.first_gradients + self.activations, self.gradients)
        peak = max(layers + self.update, self.gradients + self.stepping)
        return self.persistent + peak + self.resting

    @property
    def peak(self) -> int:
        return max(self.rollout, self.backward)


def estimate_memory(model: ModelShape, work: Workload, on_cpu: bool = False) -> Memory:
    """Estimate the memory of a step.

    Args:
        on_cpu: whether the device is the CPU, whose memory also holds inputs and libraries.
    """
    text = model.text
    tokens = work.patches // model.vision.merge
    values = work.num_groups * work.patches * model.vision.patch_values
    # The next step's prompts are prepared while this one computes.
    inputs = 2 * 4 * values + 3 * min(RECENT_IMAGES, 2 * work.num_groups) * work.image_pixels
    trained = model.trained_bytes * model.num_trained
    head = 0 if model.head_frozen else model.trained_bytes * text.hidden * text.vocabulary
    accumulates = work.num_micro_batches > 1 or work.iterations > 1
    features = 0
    if model.shares_prompts and not model.trains_vision:
        features = work.num_prompts * tokens * text.hidden * model.value_bytes
    activations, offloaded = count_activation_bytes(model, work, on_cpu), 0
    if model.offloads:  # a layer's are still being copied, or are fetched ahead
        layer = _count_layer_bytes(model, work, on_cpu)
        activations, offloaded = min(layer, activations), activations
    return Memory(
        weights=_count_weight_bytes(model),
        optimizer=model.count_state_bytes(work.optimizer),
        reference=trained if work.uses_reference else 0,
        teacher=work.teacher_weights * model.value_bytes,
        gradients=trained,
        first_gradients=trained if accumulates else head,
        libraries=LIBRARIES[_get_compute_dtype(model)] if on_cpu else 0,
        inputs=inputs,
        features=features + (inputs if on_cpu else 0),
        folded=_count_folded_bytes(model, on_cpu),
        cache=count_cache_bytes(model, work),
        sampling=max(
            _count_encoding_bytes(model, work),
            _count_prefill_bytes(model, work),
            _count_decoding_bytes(model, work),
        )
        + model.largest_quantized * model.value_bytes,  # restored for its product
        activations=activations,
        update=_count_update_bytes(model, work, on_cpu)
        + model.largest_quantized * model.value_bytes,
        stepping=model.count_step_bytes(work.optimizer),
        offloaded=offloaded,
    )


def _get_compute_dtype(model: ModelShape) -> str:
    return "float32" if model.precision == "float32" else "bfloat16"


def _count_weight_bytes(model: ModelShape) -> int:
    # PEFT holds adapters in float32.
    adapters = 4 * (model.num_trained + model.num_initial) if model.lora_rank else 0
    whole = (model.num_weights - model.quantized_weights) * model.weight_bytes
    return whole + model.quantized_bytes + adapters


def _count_folded_bytes(model: ModelShape, on_cpu: bool) -> int:
    """Count copies for sampling (``engine/rollout_weights.py``): float32 weights with merged
    adapters, and autocast's casts; on the CPU all linear modules, in oneDNN's layout. The planner
    adds those of quantized weights on a GPU."""
    if on_cpu or model.precision == "autocast":
        return model.num_linear * model.value_bytes
    if model.quantized_weights:
        return 0
    return model.num_adapted * model.value_bytes if model.precision == "float32" else 0


def _uses_varlen(model: ModelShape, on_cpu: bool) -> bool:
    """Return whether attention is one call of the kernel of ``engine/varlen.py``."""
    return not on_cpu and _get_compute_dtype(model) == "bfloat16"


def count_bytes_per_token(model: ModelShape, on_cpu: bool = False) -> int:
    """Count the bytes that one token saves in one decoder layer."""
    saved = _count_bytes_with_plain_norms(model, on_cpu)
    return saved if on_cpu else saved - count_fused_norm_bytes(model)


def count_fused_norm_bytes(model: ModelShape) -> int:
    """Count the bytes per token and layer that the fused kernel of norms saves less."""
    t = model.text
    if not t.fuses_norms or (model.lora_rank and model.precision == "float32"):
        return 0
    # Autocast's queries and keys have another precision than the weights of their norms.
    heads = t.query + t.key if t.qk_norm and model.precision != "autocast" else 0
    return (2 if model.lora_rank else 4) * (2 * t.hidden + heads)


def _count_bytes_with_plain_norms(model: ModelShape, on_cpu: bool) -> int:
    t = model.text
    h, m = t.hidden, t.intermediate
    attention = (2 if _uses_varlen(model, on_cpu) else 3) * t.query + 2 * t.key
    statistics = t.heads + 2
    if model.lora_rank:
        ranks = LINEAR_MODULES * model.lora_rank
        if model.precision == "float32":
            saved = 4 * (4 * h + attention + 4 * m + ranks + statistics)
        else:
            saved = 4 * (2 * h + statistics) + 2 * (2 * h + attention + 4 * m + ranks)
        if model.has_norms:  # each product, before it is scaled
            saved += (t.query + 2 * t.key + 2 * h + 2 * m) * model.value_bytes
        return saved + (4 * _count_qk_norm_values(t, 1) if t.qk_norm else 0)
    if model.precision == "float32":
        saved = 4 * (6 * h + attention + 4 * m + statistics)
        return saved + (4 * _count_qk_norm_values(t, 2) if t.qk_norm else 0)
    if model.precision == "bfloat16":
        saved = 4 * (2 * h + statistics) + 2 * (4 * h + attention + 4 * m)
    else:
        saved = 4 * (4 * h + statistics) + 2 * (5 * h + attention + 4 * m)
    return saved + (4 * _count_qk_norm_values(t, 1) + 2 * (t.query + t.key) if t.qk_norm else 0)


def count_bytes_per_prompt_token(
    model: ModelShape, num_generations: int, on_cpu: bool = False
) -> int:
    """Count the additional bytes of a token of a prompt with ``num_generations`` completions: its
    keys and values, repeated over the completions or over the query heads."""
    text = model.text
    if _uses_varlen(model, on_cpu):
        return 2 * text.key * num_generations * model.value_bytes
    repeats = on_cpu and model.precision == "float32" and text.heads != text.key_heads
    return 2 * text.query * model.value_bytes if repeats else 0


def _count_qk_norm_values(text: TextShape, copies: int) -> int:
    return copies * (text.query + text.key) + text.heads + text.key_heads


def count_bytes_per_patch(model: ModelShape, on_cpu: bool = False) -> int:
    """Count the bytes that one patch saves in one block of a trained vision tower.

    Attention saves 6 widths: queries, keys, the output and, for the values, the full output of the
    joint projection.
    """
    v = model.vision
    statistics = v.heads + (2 if v.gated else 4)  # root mean squares, or means and deviations
    mlp = v.mlp_activations * v.intermediate
    fused = 0 if on_cpu else 2  # norms that keep one value less, or one of half the size
    if model.precision == "float32":
        return 4 * ((13 - fused if v.gated else 11) * v.hidden + mlp + statistics)
    if v.gated and model.precision == "bfloat16":
        return 4 * ((2 - fused) * v.hidden + statistics) + 2 * (11 * v.hidden + mlp)
    if v.gated:
        return 4 * (2 * v.hidden + statistics) + 2 * (12 * v.hidden + mlp)
    return 4 * statistics + 2 * (11 * v.hidden + mlp)


def count_activation_bytes(model: ModelShape, work: Workload, on_cpu: bool = False) -> int:
    """Count the bytes that the largest micro-batch saves for its backward pass."""
    text, vision = model.text, model.vision
    tokens, patches = work.micro_tokens, work.micro_patches
    stream_bytes = 2 if model.precision == "bfloat16" else 4  # per value of the residual stream
    inputs = tokens * text.hidden * stream_bytes
    layer = _count_layer_bytes(model, work, on_cpu)
    saved = text.layers * (
        inputs
        if model.checkpointing == "full"
        else layer - _count_recomputed_bytes(model, text, tokens)
    )
    if model.trains_vision:
        inputs = patches * vision.hidden * model.value_bytes
        saved += vision.layers * (
            inputs
            if model.checkpointing == "full"
            else _count_block_bytes(model, work, on_cpu)
            - _count_recomputed_bytes(model, vision, patches)
        )
        saved += 3 * patches * vision.hidden * 4  # the merger
    # The embeddings, the final norm, and the hidden states that predict tokens.
    return saved + 4 * tokens * text.hidden * 4


def count_mlp_bytes(model: ModelShape, part: TextShape | VisionShape, tokens: int) -> int:
    """Count the bytes that a layer's feed-forward part saves, in addition to its input."""
    values = part.mlp_activations * part.intermediate
    if part is model.text:
        values += 3 * model.lora_rank
    return tokens * values * model.value_bytes + count_mlp_casts(model, part)


def count_mlp_casts(model: ModelShape, part: TextShape | VisionShape) -> int:
    """Count the bytes of the casts of weights that a layer's feed-forward part saves."""
    if model.precision == "autocast":
        return 2 * part.mlp_weights
    is_adapted = part is model.text and model.precision == "bfloat16"
    return 2 * model.lora_rank * 3 * (part.hidden + part.intermediate) if is_adapted else 0


def _count_recomputed_bytes(model: ModelShape, part: TextShape | VisionShape, tokens: int) -> int:
    return count_mlp_bytes(model, part, tokens) if model.checkpointing == "mlp" else 0


def _count_layer_bytes(model: ModelShape, work: Workload, on_cpu: bool) -> int:
    saved = work.micro_tokens * count_bytes_per_token(model, on_cpu) + count_cast_bytes(model)
    per_prompt_token = count_bytes_per_prompt_token(model, work.num_generations, on_cpu)
    return saved + work.micro_prompt_tokens * per_prompt_token


def _count_block_bytes(model: ModelShape, work: Workload, on_cpu: bool) -> int:
    casts = _count_autocast_bytes(model, model.vision)
    return work.micro_patches * count_bytes_per_patch(model, on_cpu) + casts


def count_cast_bytes(model: ModelShape) -> int:
    """Count the bytes of copies of weights that a decoder layer saves: casts to bfloat16, and an
    adapter's factors joined with its initial ones."""
    if model.lora_rank and (model.precision == "bfloat16" or model.num_initial):
        return model.value_bytes * model.lora_rank * model.text.adapter_widths
    return _count_autocast_bytes(model, model.text)


def _count_autocast_bytes(model: ModelShape, part: TextShape | VisionShape) -> int:
    return 2 * part.layer_weights if model.precision == "autocast" else 0


def _count_update_bytes(model: ModelShape, work: Workload, on_cpu: bool) -> int:
    """Count the largest short-lived tensors: the logits of a chunk, or the gradients of one layer,
    with its activations if they are recomputed."""
    text = model.text
    rows = min(work.head_chunk_tokens or work.micro_completion_tokens, work.micro_completion_tokens)
    logits = rows * text.vocabulary * (12 if model.head_frozen else 20)
    # Gradients of the MLP's product, activation and up, and of the stream and its norm. Their saved
    # tensors are freed before the gradients of attention are allocated.
    layer = work.micro_tokens * (3 * text.intermediate + 4 * text.hidden)
    gradients = 0 if model.lora_rank else model.trained_bytes * text.layer_weights
    layer = layer * model.value_bytes + gradients
    encoding = _count_encoding_bytes(model, work) if model.trains_vision else 0
    if model.checkpointing == "full":
        layer += _count_layer_bytes(model, work, on_cpu)
        encoding += _count_block_bytes(model, work, on_cpu) if model.trains_vision else 0
    layer += _count_recomputed_bytes(model, text, work.micro_tokens)
    if model.has_norms:  # s B A, and its sum with W
        layer += 2 * 4 * text.hidden * max(text.intermediate, text.query)
    return max(logits, layer, encoding)


def count_cache_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of the KV cache: each prompt once, and all its completions."""
    tokens = work.prompt_tokens + work.num_generations * work.completion_tokens
    return work.concurrent_prompts * tokens * count_key_bytes(model)


def count_key_bytes(model: ModelShape) -> int:
    """Count the bytes of a token's keys and values in all layers."""
    return 2 * model.text.layers * model.text.key * model.value_bytes


def _count_encoding_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of the vision tower without gradient, on the images encoded at once."""
    vision = model.vision
    patches = min(work.num_prompts * work.patches, max(ENCODER_PATCHES, work.patches))
    if not model.shares_prompts:  # the images of all rows at once
        patches = max(work.concurrent_prompts * work.patches, work.micro_patches)
    widths = 10 * vision.hidden + (3 if vision.gated else 2) * vision.intermediate
    return patches * (4 * vision.patch_values + widths * model.value_bytes)


def _count_prefill_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of a prefill pass: one layer's values, and the keys and values of all layers
    before they are copied into the cache."""
    text = model.text
    tokens = work.prefill_prompts * work.prompt_tokens
    layer = 5 * text.hidden + max(3 * text.intermediate, 5 * text.query)
    return tokens * (layer * model.value_bytes + count_key_bytes(model))


def _count_decoding_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of a decoding step: attention scores and weights over prompt and completion,
    or the logits and their copies."""
    text = model.text
    rows = work.concurrent_prompts * work.num_generations
    keys = text.heads * (work.prompt_tokens + work.completion_tokens)
    scores = rows * keys * (4 * 4 + model.value_bytes)
    return max(scores, rows * text.vocabulary * (model.value_bytes + LOGIT_BYTES))


def shard_memory(memory: Memory, model: ModelShape, devices: int) -> Memory:
    """Return the memory per device if FSDP2 shards the weights and streams the layers.

    Each device keeps a part of the weights, their gradients and the optimizer's moments. What is
    outside the language model's layers stays gathered; the layers are gathered for the rollout,
    and two of them at once in the update (docs/scaling.md has the formulas). Adapters are not
    sharded.
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
