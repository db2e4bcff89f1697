"""Memory of a step, in bytes, from shapes alone.

What a layer keeps for its backward pass is counted operation by operation in the models' code and
in ours (``engine/attention.py``), and held against autograd's own count by the tests. With h the
hidden width, q and k the widths of all queries and of all keys, m the intermediate width, a the
heads, r the rank, one token keeps in one decoder layer, in bytes:

=============  ===============================================================================
LoRA, float32  4 · (4h + 3q + 2k + 4m + 7r + a + 2)
full, float32  4 · (6h + 3q + 2k + 4m + a + 2)
LoRA, bf16     4 · (2h + a + 2) + 2 · (2h + 3q + 2k + 4m + 7r), and a cast of each adapter
full, bf16     4 · (4h + a + 2) + 2 · (5h + 3q + 2k + 4m), and a cast of each linear weight
=============  ===============================================================================

In each: two residual streams and two normalised ones (h; two more where a norm's weight is
trained), queries, the output of attention and the output map's input (q each), keys and values (k
each), and gate, its activation, up and their product (m). A norm on queries and keys adds q + k.
Where query heads share key heads, a prompt's token keeps keys and values repeated too: 2q.

A peak adds what lives for a moment only: the temporaries of one layer, logits of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_grpo.engine.vision import ENCODER_PATCHES
from vlm_grpo.model.policy import RECENT_IMAGES
from vlm_grpo.planning.shape import ModelShape, TextShape, VisionShape
from vlm_grpo.planning.work import Work

LINEARS = 7  # linear maps of a decoder layer
LIBRARIES = {"float32": 60_000_000, "bfloat16": 120_000_000}
"""Bytes that libraries take on a CPU once they are used, whatever the model: code, buffers, and in
bfloat16 the kernels that oneDNN makes for every shape. Fitted to ``perf/plan_accuracy.py``."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: of the model and its adapters.
        optimizer: AdamW's two moments.
        reference: the reference policy's snapshot.
        gradients: of the trained weights.
        libraries: what they take of a CPU's memory beside tensors.
        inputs: pixel values and decoded images, in the main memory of a machine with a GPU.
        features: what a frozen vision tower made of the step's images.
        folded: copies of weights that decoding is faster with.
        cache: keys and values of prompts and completions while sampling.
        sampling: what lives for a moment while sampling.
        activations: what the largest micro-batch keeps for its backward pass.
        update: what lives for a moment in the update.
    """

    weights: int
    optimizer: int
    reference: int
    gradients: int
    libraries: int
    inputs: int
    features: int
    folded: int
    cache: int
    sampling: int
    activations: int
    update: int

    @property
    def resting(self) -> int:
        """What is held all the time."""
        held = self.weights + self.optimizer + self.reference
        return held + self.features + self.libraries

    @property
    def rollout(self) -> int:
        """Peak while sampling."""
        return self.resting + self.folded + self.cache + self.sampling

    @property
    def backward(self) -> int:
        """Peak in the update."""
        return self.resting + self.gradients + self.activations + self.update

    @property
    def peak(self) -> int:
        return max(self.rollout, self.backward)


def estimate_memory(model: ModelShape, work: Work, on_cpu: bool = False) -> Memory:
    """The memory of a step.

    Args:
        on_cpu: the pixel values and decoded images lie in the same memory as the rest.
    """
    text = model.text
    tokens = work.patches // model.vision.merge
    values = work.prompts * work.patches * model.vision.patch_values
    # The next step's prompts are prepared while this one computes.
    inputs = 2 * 4 * values + 3 * min(RECENT_IMAGES, 2 * work.prompts) * work.image_pixels
    several = work.micro_batches > 1 or work.iterations > 1
    features = 0
    if not model.trains_vision:
        features = work.prompts * tokens * text.hidden * model.value_bytes
    return Memory(
        weights=_weights(model),
        optimizer=2 * 4 * model.trained,
        reference=4 * model.trained if work.reference else 0,
        # With a single micro-batch gradients come into being while activations go.
        gradients=4 * model.trained if several else 0,
        libraries=LIBRARIES[_arithmetic(model)] if on_cpu else 0,
        inputs=inputs,
        features=features + (inputs if on_cpu else 0),
        folded=_folded(model, on_cpu),
        cache=cache_bytes(model, work),
        sampling=max(_encoding(model, work), _prefilling(model, work), _decoding(model, work)),
        activations=activation_bytes(model, work, on_cpu),
        update=_update(model, work, on_cpu),
    )


def _arithmetic(model: ModelShape) -> str:
    return "float32" if model.precision == "float32" else "bfloat16"


def _weights(model: ModelShape) -> int:
    adapters = 4 * model.trained if model.rank else 0  # PEFT holds adapters in float32
    return model.weights * model.weight_bytes + adapters


def _folded(model: ModelShape, on_cpu: bool) -> int:
    """Copies for sampling (``engine/linear.py``): float32 weights with their adapters folded in,
    and autocast's casts; on the CPU every linear map, in oneDNN's own layout."""
    if on_cpu or model.precision == "autocast":
        return model.linear * model.value_bytes
    return model.adapted * model.value_bytes if model.precision == "float32" else 0


def kept_per_token(model: ModelShape) -> int:
    """Bytes that one token keeps in one decoder layer for the backward pass."""
    t = model.text
    h, m = t.hidden, t.intermediate
    attention = 3 * t.query + 2 * t.key
    small = t.heads + 2
    if model.rank:
        ranks = LINEARS * model.rank
        if model.precision == "float32":
            kept = 4 * (4 * h + attention + 4 * m + ranks + small)
        else:
            kept = 4 * (2 * h + small) + 2 * (2 * h + attention + 4 * m + ranks)
        return kept + (4 * _head_norms(t, 1) if t.normed_heads else 0)
    if model.precision == "float32":
        kept = 4 * (6 * h + attention + 4 * m + small)
        return kept + (4 * _head_norms(t, 2) if t.normed_heads else 0)
    kept = 4 * (4 * h + small) + 2 * (5 * h + attention + 4 * m)
    return kept + (4 * _head_norms(t, 1) + 2 * (t.query + t.key) if t.normed_heads else 0)


def kept_per_prompt_token(model: ModelShape, on_cpu: bool = False) -> int:
    """What a prompt's token keeps besides: keys and values, repeated for the heads sharing them,
    but for bfloat16 on the CPU, where no kernel needs them (``engine/kernels.py``)."""
    text = model.text
    if on_cpu and _arithmetic(model) == "bfloat16":
        return 0
    return 0 if text.heads == text.key_heads else 2 * text.query * model.value_bytes


def _head_norms(text: TextShape, copies: int) -> int:
    """Numbers kept by the norms of queries and keys."""
    return copies * (text.query + text.key) + text.heads + text.key_heads


def kept_per_patch(model: ModelShape) -> int:
    """Bytes that one patch keeps in one block of a vision tower that is trained.

    Attention keeps queries, keys, the output and, for the values, the whole of the three maps'
    output: 6 widths.
    """
    v = model.vision
    sums = v.heads + (2 if v.gated else 4)  # root mean squares, or means and deviations
    feed = v.activations * v.intermediate
    if model.precision == "float32":
        return 4 * ((13 if v.gated else 11) * v.hidden + feed + sums)
    if v.gated:
        return 4 * (2 * v.hidden + sums) + 2 * (12 * v.hidden + feed)
    return 4 * sums + 2 * (11 * v.hidden + feed)


def activation_bytes(model: ModelShape, work: Work, on_cpu: bool = False) -> int:
    """What the largest micro-batch keeps for its backward pass."""
    text, vision = model.text, model.vision
    tokens, patches = work.micro_tokens, work.micro_patches
    width = 2 if model.precision == "bfloat16" else 4  # of the residual stream
    inputs = tokens * text.hidden * width
    kept = text.layers * (inputs if model.checkpointing else _kept_layer(model, work, on_cpu))
    if model.trains_vision:
        inputs = patches * vision.hidden * model.value_bytes
        kept += vision.layers * (inputs if model.checkpointing else _kept_block(model, work))
        kept += 3 * patches * vision.hidden * 4  # the merger
    # The embedded row, its final norm, and the predicting states.
    return kept + 4 * tokens * text.hidden * 4


def _kept_layer(model: ModelShape, work: Work, on_cpu: bool) -> int:
    kept = work.micro_tokens * kept_per_token(model) + kept_casts(model)
    return kept + work.micro_prompt_tokens * kept_per_prompt_token(model, on_cpu)


def _kept_block(model: ModelShape, work: Work) -> int:
    return work.micro_patches * kept_per_patch(model) + _autocasts(model, model.vision)


def kept_casts(model: ModelShape) -> int:
    """Bytes of weights in bfloat16 that a decoder layer keeps for its backward pass."""
    if model.rank and model.precision == "bfloat16":
        return 2 * model.rank * model.text.adapter_widths
    return _autocasts(model, model.text)


def _autocasts(model: ModelShape, part: TextShape | VisionShape) -> int:
    return 2 * part.layer_weights if model.precision == "autocast" else 0


def _update(model: ModelShape, work: Work, on_cpu: bool) -> int:
    """The largest of what lives for a moment: the head's logits, or one layer's gradients, with
    its activations where they are computed again."""
    text = model.text
    rows = min(work.chunk or work.micro_completion_tokens, work.micro_completion_tokens)
    logits = rows * text.vocabulary * (12 if model.head_frozen else 20)
    # Gradients of the product, of the activation and of up, of the stream and of its norm: what
    # was kept for them goes as those of the attention come.
    layer = work.micro_tokens * (3 * text.intermediate + 4 * text.hidden)
    layer = layer * model.value_bytes + (0 if model.rank else 4 * text.layer_weights)
    encoding = _encoding(model, work) if model.trains_vision else 0
    if model.checkpointing:
        layer += _kept_layer(model, work, on_cpu)
        encoding += _kept_block(model, work) if model.trains_vision else 0
    return max(logits, layer, encoding)


def cache_bytes(model: ModelShape, work: Work) -> int:
    """Keys and values in the slots, prompts once and completions each."""
    text = model.text
    tokens = work.slots * (work.prompt + work.group * work.completion)
    return 2 * text.layers * tokens * text.key * model.value_bytes


def _encoding(model: ModelShape, work: Work) -> int:
    """The vision tower without gradient, on as many images as are encoded at once."""
    vision = model.vision
    patches = min(work.prompts * work.patches, max(ENCODER_PATCHES, work.patches))
    widths = 10 * vision.hidden + (3 if vision.gated else 2) * vision.intermediate
    return patches * (4 * vision.patch_values + widths * model.value_bytes)


def _prefilling(model: ModelShape, work: Work) -> int:
    """One pass over prompts without gradient: one layer's values, and keys and values of all
    layers beside the slots that they are copied to."""
    text = model.text
    tokens = work.prefill * work.prompt
    layer = 5 * text.hidden + max(3 * text.intermediate, 5 * text.query)
    keys = 2 * text.layers * text.key
    return tokens * (layer + keys) * model.value_bytes


def _decoding(model: ModelShape, work: Work) -> int:
    """One token for each completion: attention's scores and weights over prompt and completion,
    and the logits with their copies (float32, probabilities, sums in float64)."""
    text = model.text
    rows = work.slots * work.group
    scores = rows * text.heads * (work.prompt + work.completion) * (4 * 4 + model.value_bytes)
    return max(scores, rows * text.vocabulary * (model.value_bytes + 5 * 4 + 2 * 8))
