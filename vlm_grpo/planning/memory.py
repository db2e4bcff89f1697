"""Memory of a step in bytes.

The bytes that a layer saves for its backward pass are measured (``layer_memory.py``); those of
states and caches are computed from the numbers of weights and tokens. A peak adds short-lived
tensors, which are estimated: the temporaries of one layer or the logits of one chunk.
"""

import math
from dataclasses import dataclass, replace

from vlm_grpo.config.rollout import RolloutSettings, choose_adapter_level
from vlm_grpo.model.engine.graphs import KEPT_STEPS
from vlm_grpo.model.engine.packing import (
    ENCODER_PATCHES,
    LOGIT_BYTES,
    PREFILL_TOKENS,
    RECENT_IMAGES,
)
from vlm_grpo.planning.devices import CONTEXT, Device
from vlm_grpo.planning.sizes import ModelShape, Workload

# Bytes that libraries use on a CPU, by the bytes of a value: code, buffers, and in bfloat16 the
# kernels that oneDNN compiles for every shape. Fitted to ``perf/plan_accuracy.py``.
LIBRARIES = {4: 60_000_000, 2: 120_000_000}
GRAPH = 30_000_000
"""Bytes of a captured decode step, by calculation: its kernels' arguments, and its results."""

UPDATE_TOKENS = 1024, 65_536
"""The smallest and the largest automatic number of tokens in a micro-batch of the update."""
ENOUGH_TOKENS = 4096
"""Tokens in a micro-batch with which a GPU is busy: fewer save less time than recomputing costs."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: int
    optimizer: int
    reference: int
    gradients: int  # of the trained weights, at the end of the backward pass
    # Gradients that exist while all activations are still saved: with several micro-batches all,
    # with one those of the output head.
    first_gradients: int
    libraries: int  # memory of libraries on a CPU, in addition to tensors
    inputs: int  # pixel values and decoded images; on a machine with a GPU, in its main memory
    features: int
    folded: int  # repacked or merged copies of weights, which speed up decoding
    cache: int
    sampling: int
    activations: int
    update: int
    graphs: int = 0
    stepping: int = 0
    offloaded: int = 0
    host: int = 0
    copied: int = 0  # between main memory and the device in a step
    teacher: int = 0
    server: int = 0
    resting: int = 0
    server_sleeps: bool = False  # with its weights in main memory

    @property
    def persistent(self) -> int:
        """Memory held throughout the step."""
        states = self.weights + self.optimizer + self.reference + self.teacher
        return states + self.features + self.libraries

    @property
    def rollout(self) -> int:
        """Peak while sampling."""
        held = self.folded + self.cache + self.graphs + self.sampling + self.server
        return self.persistent + held

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
    """Estimate the memory of a step; that of a CPU also holds inputs and libraries."""
    text = model.text
    values = work.num_groups * work.patches * model.vision.patch_values
    # The next step's prompts are prepared while this one computes; what is observed is kept.
    inputs = 2 * 4 * values + 4 * work.observed_patches * model.vision.patch_values
    inputs += 3 * min(RECENT_IMAGES, 2 * work.num_groups) * work.image_pixels
    trained = model.trained_bytes * model.num_trained
    head = 0 if model.head_frozen else model.trained_bytes * text.hidden * text.vocabulary
    accumulates = work.num_micro_batches > 1 or work.iterations > 1
    features = 0
    if model.shares_prompts and not model.trains_vision:
        results = work.num_generations * work.results * work.result_image_tokens
        tokens = work.num_prompts * (work.image_tokens + results)
        features = tokens * text.hidden * model.value_bytes
    activations, offloaded = _count_activation_bytes(model, work), 0
    if model.offloads:  # a layer's are still being copied, or are fetched ahead
        layer = model.measured_layer.count(*work.micro_rows)
        activations, offloaded = min(layer, activations), activations
    weights = (model.num_weights - model.quantized_weights) * model.weight_bytes
    # PEFT holds adapters in float32.
    copies = work.extra_copies + (work.uses_reference and not work.reference_on_host)
    adapters = 4 * model.num_trained if model.lora_rank else 0
    restored = model.largest_quantized * model.value_bytes  # a matrix, for its product
    passes = (_count_encoding_bytes, _count_prefill_bytes, _count_decoding_bytes)
    return Memory(
        weights=weights + model.quantized_bytes + adapters,
        optimizer=model.state_bytes[work.optimizer],
        reference=trained * copies,
        teacher=work.teacher_weights * model.value_bytes,
        gradients=trained,
        first_gradients=trained if accumulates else head,
        libraries=LIBRARIES[model.value_bytes] if on_cpu else 0,
        inputs=inputs,
        features=features + (inputs if on_cpu else 0),
        folded=_count_folded_bytes(model, on_cpu),
        cache=count_cache_bytes(model, work),
        sampling=max(count(model, work) for count in passes) + restored,
        activations=activations,
        update=_count_update_bytes(model, work, on_cpu) + restored,
        stepping=model.count_step_bytes(work.optimizer),
        offloaded=offloaded,
    )


def fit_update_tokens(free: float, token: float, least: int = UPDATE_TOKENS[0]) -> int:
    """Return how many tokens, in multiples of 1,024, fit into four fifths of the free bytes.

    Args:
        free: bytes of memory that are free.
        token: bytes per token of a micro-batch.
        least: the result if fewer fit.
    """
    fitting = int(0.8 * free / max(token, 1)) // 1024 * 1024
    return min(max(fitting, least), UPDATE_TOKENS[1])


def _count_folded_bytes(model: ModelShape, on_cpu: bool) -> int:
    # Copies for sampling (``engine/rollout_weights.py``): float32 weights with merged adapters, and
    # autocast's casts; on the CPU all linear modules, in oneDNN's layout. The planner adds those of
    # quantized weights on a GPU.
    if on_cpu or model.precision == "autocast":
        return model.num_linear * model.value_bytes
    if model.quantized_weights:
        return 0
    return model.num_adapted * model.value_bytes if model.precision == "float32" else 0


def _count_activation_bytes(model: ModelShape, work: Workload) -> int:
    layer = model.measured_layer
    kept = layer.count_kept(model.checkpointing, *work.micro_rows)
    if model.lora_rank and model.precision == "bfloat16":  # adapters are cast for the whole pass
        kept += {"full": layer.fixed, "mlp": layer.mlp_fixed}.get(model.checkpointing, 0)
    saved = model.text.layers * kept
    if model.block is not None:
        kept = model.block.count_kept(model.checkpointing, work.micro_patches)
        saved += model.vision.layers * kept
        saved += 3 * work.micro_patches * model.vision.hidden * 4  # the merger
    # The embeddings, the final norm, and the hidden states that predict tokens.
    return saved + 4 * work.micro_tokens * model.text.hidden * 4


def _count_update_bytes(model: ModelShape, work: Workload, on_cpu: bool) -> int:
    """Count the largest short-lived tensors: the logits of a chunk, or the gradients of one layer,
    with its activations if they are recomputed."""
    text = model.text
    rows = min(work.head_chunk_tokens or work.micro_completion_tokens, work.micro_completion_tokens)
    logits = rows * text.vocabulary * (12 if model.head_frozen else 20)
    # Gradients of the MLP's product, activation and up, and of the stream and its norm. Their saved
    # tensors are freed before the gradients of attention are allocated.
    layer = work.micro_tokens * (3 * text.intermediate + 4 * text.hidden) * model.value_bytes
    if model.shares_prompts and model.value_bytes == 2 and not on_cpu:
        layer = max(layer, count_flash_bytes(model, work))
    layer += 0 if model.lora_rank else model.trained_bytes * text.layer_weights
    encoding = _count_encoding_bytes(model, work) if model.trains_vision else 0
    if model.checkpointing == "full":
        layer += model.measured_layer.count(*work.micro_rows)
        encoding += 0 if model.block is None else model.block.count(work.micro_patches)
    elif model.checkpointing == "mlp":
        layer += model.measured_layer.count_mlp(work.micro_tokens)
    if model.has_norms:  # s B A, and its sum with W
        layer += 2 * 4 * text.hidden * max(text.intermediate, text.query)
    return max(logits, layer, encoding)


def count_flash_bytes(model: ModelShape, work: Workload) -> int:
    """Count what FlashAttention's backward pass over a packed row allocates in one layer.

    The gradient of the queries is summed in float32. Those of keys and values are computed for each
    query head and for each copy of a prompt before a completion, then summed over heads (PyTorch's
    ``mha_varlen_bwd``) and, one after the other in float32, over copies (``kernels.VarlenPlan``).
    """
    text, (tokens, prompts, generations) = model.text, work.micro_rows
    keys = tokens + generations * prompts
    sequences = prompts // work.prompt_tokens * (1 + generations)
    # Each sequence's gradient of the queries is padded by up to 128 rows.
    queries = (4 + 2) * text.query * tokens + 4 * text.query * 128 * sequences
    expanded = 2 * 2 * text.query * keys if text.heads > text.key_heads else 0
    return queries + expanded + 2 * 2 * text.key * keys + 4 * text.key * (keys + tokens)


def count_graph_bytes(work: Workload) -> int:
    """Count the bytes of captured decode steps, one for each size that the cache shrinks to.

    The update frees those that are kept for the next rollout, with their cache, if it needs memory.
    """
    places = work.concurrent_prompts * work.num_generations
    return GRAPH * min(KEPT_STEPS, 1 + int(math.log(places, 4)))  # a quarter each time


def count_cache_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of the KV cache: each prompt once, and all its completions; after the first
    turn of episodes, each with its prompt."""
    first = work.prompt_tokens + work.num_generations * work.path_tokens
    later = work.continued * (work.prompt_tokens + work.path_tokens)
    return max(work.concurrent_prompts * first, later) * count_key_bytes(model)


def count_key_bytes(model: ModelShape) -> int:
    """Count the bytes of a token's keys and values in all layers."""
    return 2 * model.text.layers * model.text.key * model.value_bytes


def _count_encoding_bytes(model: ModelShape, work: Workload) -> int:
    vision = model.vision
    patches = work.num_prompts * work.patches + work.observed_patches
    patches = min(patches, max(ENCODER_PATCHES, work.patches))
    if not model.shares_prompts:  # the images of all rows at once
        patches = max(work.concurrent_prompts * work.patches, work.micro_patches)
    widths = 10 * vision.hidden + (3 if vision.gated else 2) * vision.intermediate
    return patches * (4 * vision.patch_values + widths * model.value_bytes)


def _count_prefill_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of one layer's values, and of the keys and values of all layers before they
    are copied into the cache."""
    text = model.text
    prompts = work.concurrent_prompts
    if work.copies == 1:
        prompts = min(prompts, max(1, PREFILL_TOKENS // work.prompt_tokens))
    tokens = prompts * work.prompt_tokens
    if work.results:  # what the episodes have so far, too
        whole = work.prompt_tokens + work.path_tokens
        tokens = max(tokens, min(max(PREFILL_TOKENS, whole), work.continued * whole))
    layer = 5 * text.hidden + max(3 * text.intermediate, 5 * text.query)
    return tokens * (layer * model.value_bytes + count_key_bytes(model))


def _count_decoding_bytes(model: ModelShape, work: Workload) -> int:
    """Count the bytes of attention scores and weights over prompt and completion, or of the logits
    and their copies."""
    text = model.text
    rows = work.concurrent_prompts * work.num_generations
    keys = text.heads * (work.prompt_tokens + work.path_tokens)
    scores = rows * keys * (4 * 4 + model.value_bytes)
    return max(scores, rows * text.vocabulary * (model.value_bytes + LOGIT_BYTES))


def shard_memory(
    memory: Memory, model: ModelShape, work: Workload, devices: int, offloads: bool
) -> Memory:
    """Return the memory per device if FSDP2 shards the weights and streams the layers, and perhaps
    keeps the shards in main memory (docs/scaling.md has the formulas).

    Each device keeps a part of the weights, their gradients and the optimizer's moments. What is
    outside the language model's layers stays gathered, with its gradients; the layers are gathered
    for the rollout, and two of them at once in the update. Adapters are not sharded.

    Shards in main memory are copied to the device once for the rollout, and in the update twice for
    each pass; gradients of full weights are copied back.
    """
    layers = model.text.layers * model.text.layer_weights
    outside = model.num_weights - layers
    shards = model.weight_bytes * (model.num_weights // devices)
    changed = {
        "weights": model.weight_bytes * outside + shards,
        "update": memory.update + 2 * model.text.layer_weights * model.value_bytes,
    }
    per_weight = model.trained_bytes
    trained_shards = per_weight * (model.num_trained // devices)
    if model.lora_rank:
        changed["weights"] += 4 * model.num_trained
    else:
        changed |= {name: getattr(memory, name) // devices for name in ("optimizer", "reference")}
        gradients = per_weight * min(outside, model.num_trained) + trained_shards
        accumulates = memory.first_gradients == memory.gradients
        first = gradients if accumulates else min(memory.first_gradients, gradients)
        changed |= {"gradients": gradients, "first_gradients": first}
    if model.precision == "autocast":  # layers are gathered in bfloat16 and hold no casts
        changed["update"] += 2 * outside
        layer = model.measured_layer
        casts = layer.fixed * (model.checkpointing != "full")
        casts -= layer.mlp_fixed * (model.checkpointing == "mlp")
        changed["activations"] = memory.activations - model.text.layers * casts
    else:
        changed["folded"] = memory.folded + layers * model.value_bytes
    memory = replace(memory, **changed)
    if not offloads:
        return memory
    passes = work.num_micro_batches * work.iterations
    changed = {"weights": memory.weights - shards, "host": shards}
    changed["copied"] = model.weight_bytes * (2 * outside + (1 + 2 * passes) * layers) // devices
    if not model.lora_rank:
        changed["host"] += memory.optimizer + memory.reference + trained_shards
        changed |= {"optimizer": 0, "reference": 0, "stepping": 0}
        changed["gradients"] = memory.gradients - trained_shards
        changed["first_gradients"] = min(memory.first_gradients, changed["gradients"])
        changed["copied"] += per_weight * (outside + passes * layers) // devices
    return replace(memory, **changed)


def add_server(
    memory: Memory, model: ModelShape, rollout: RolloutSettings, device: Device
) -> Memory:
    """Return the memory of a step in which the servers of the settings sample, not the policy.

    A server that the run starts takes its share of the GPU while it samples, whatever it samples.
    During the update it keeps what its sleep level leaves, and the driver's memory.
    """
    vllm, server, resting, level = rollout.vllm, 0, 0, None
    if vllm is not None and vllm.python is not None and not device.is_cpu:
        server = int(vllm.gpu_memory_utilization * device.memory)
        weights = model.served_bytes
        if model.lora_rank:
            level = choose_adapter_level(weights, device.memory)
        resting = server if rollout.steps_ahead else CONTEXT + (weights if level == 0 else 0)
    own = {"folded": 0, "cache": 0, "sampling": 0, "graphs": 0}
    return replace(memory, **own, server=server, resting=resting, server_sleeps=level == 1)
