"""The sizes of a model that determine memory and time; needs neither torch nor transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vlm_grpo.config.optim import OptimizerName
from vlm_grpo.config.policy import Checkpointing, PolicySettings
from vlm_grpo.model.engine.batch import ROUNDED_AT_ONCE

Precision = Literal["float32", "bfloat16", "autocast"]
"""Precision of weights and computation; ``autocast``: float32 weights, bfloat16 computation."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer saves for its backward pass."""

    token: int  # of each token, or patch of an image
    fixed: int  # whatever the number of tokens: casts of weights
    mlp_token: int  # of these two, what the feed-forward part saves
    mlp_fixed: int
    input: int  # of each token of the layer's input
    prompt: int = 0  # of each prompt token in addition
    repeat: int = 0  # of each prompt token and each of its completions in addition

    def count(self, tokens: int, prompt_tokens: int = 0, generations: int = 0) -> int:
        """Count the bytes of tokens, of which some are in prompts with so many completions."""
        repeated = prompt_tokens * (self.prompt + generations * self.repeat)
        return self.token * tokens + self.fixed + repeated

    def count_mlp(self, tokens: int) -> int:
        return self.mlp_token * tokens + self.mlp_fixed

    def count_kept(self, checkpointing: Checkpointing, tokens: int, *prompts: int) -> int:
        """Count the bytes that are not recomputed, as ``count``."""
        if checkpointing == "full":
            return self.input * tokens
        mlp = self.count_mlp(tokens) if checkpointing == "mlp" else 0
        return self.count(tokens, *prompts) - mlp

    def extrapolate(self, other: LayerBytes, factor: float) -> LayerBytes:
        """Return the bytes on the line through these (factor 0) and others (factor 1)."""
        pairs = ((name, value, getattr(other, name)) for name, value in vars(self).items())
        return LayerBytes(**{name: int(a + (b - a) * factor) for name, a, b in pairs})


@dataclass(frozen=True)
class TextShape:
    """The language model: ``layers`` decoder layers with a gated MLP."""

    layers: int
    hidden: int  # width of the residual stream
    intermediate: int  # width of the MLP; of a mixture of experts, of those that a token uses
    intermediate_total: int  # width of the MLP over all experts
    heads: int
    key_heads: int
    query: int  # total width of the queries of all heads
    key: int
    vocabulary: int
    qk_norm: bool  # whether queries and keys are normalized (Qwen3)
    fuses_norms: bool = True  # whether a GPU computes norms by one kernel (``engine/forwards.py``)

    def matrices(self, intermediate: int) -> list[tuple[int, int]]:
        """Return rows and columns of a layer's matrices, with an MLP of this width."""
        up, down = (intermediate, self.hidden), (self.hidden, intermediate)
        query, key = (self.query, self.hidden), (self.key, self.hidden)
        return [query, key, key, (self.hidden, self.query), up, up, down]

    @property
    def layer_weights(self) -> int:
        return sum(map(math.prod, self.matrices(self.intermediate_total)))

    @property
    def mlp_weights(self) -> int:
        return 3 * self.hidden * self.intermediate_total

    @property
    def weights_per_token(self) -> int:
        """Number of a layer's weights that a token is multiplied with."""
        return sum(map(math.prod, self.matrices(self.intermediate)))

    @property
    def adapter_widths(self) -> int:
        """Inputs plus outputs of a layer's linear modules: its adapters' weights per rank."""
        return sum(map(sum, self.matrices(self.intermediate)))


@dataclass(frozen=True)
class VisionShape:
    """The vision tower: ``layers`` blocks over patches; ``merge`` patches become one token."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    gated: bool  # whether the MLP has three matrices (Qwen2.5) instead of two
    activation: str  # the MLP's, by transformers' name
    window: int | None  # patches per attention window; None: attention is over the full image
    full_attention_layers: int
    patch_values: int  # pixel values per patch
    merge: int

    @property
    def layer_weights(self) -> int:
        return 4 * self.hidden**2 + self.mlp_weights

    @property
    def mlp_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.intermediate


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine memory and time."""

    name: str
    text: TextShape
    vision: VisionShape
    num_weights: int  # without adapters
    num_trained: int  # with LoRA, of the adapters
    num_linear: int  # weights in all linear modules
    num_adapted: int  # weights in those that have adapters
    shares_prompts: bool  # whether a group's completions share their prompt
    lora_rank: int  # mean rank of the adapters, with the initial factors; 0 for full weights
    trains_vision: bool
    head_frozen: bool
    precision: Precision
    checkpointing: Checkpointing = "none"
    offloads: bool = False  # whether activations are kept in main memory
    quantized_weights: int = 0  # number of weights held in 4 or 8 bits
    num_initial: int = 0  # number of an adapter's initial values, which are kept (PiSSA)
    has_norms: bool = False  # whether the norms of adapted rows are trained (DoRA)
    quantized_bytes: int = 0  # of the quantized weights with their scales
    largest_quantized: int = 0  # number of weights of their largest matrix
    state_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)  # by optimizer
    layer: LayerBytes | None = None  # what a decoder layer saves; None: it is not measured
    block: LayerBytes | None = None  # the same for a block of a trained vision tower

    @property
    def measured_layer(self) -> LayerBytes:
        if self.layer is None:
            raise ValueError("the layers are not measured: call measure_layers")
        return self.layer

    def recomputed_share(self, part: TextShape | VisionShape) -> float:
        """Return the share of a layer's products that the backward pass recomputes."""
        if self.checkpointing == "mlp":
            return part.mlp_weights / part.layer_weights
        return float(self.checkpointing == "full")

    def quantize(self, matrices: Sequence[tuple[int, int]], policy: PolicySettings) -> ModelShape:
        """Return the shape with matrices of these sizes held in 4 or 8 bits."""
        sizes = [*map(math.prod, matrices)]
        return replace(
            self,
            quantized_weights=sum(sizes),
            quantized_bytes=sum(_count_quantized(*matrix, policy) for matrix in matrices),
            largest_quantized=max(sizes, default=0),
        )

    @property
    def weight_bytes(self) -> int:
        return 2 if self.precision == "bfloat16" else 4

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained weight, and per gradient; adapters are in float32."""
        return 4 if self.lora_rank else self.weight_bytes

    def count_step_bytes(self, name: OptimizerName) -> int:
        """Count short-lived tensors of the optimizer's step, which takes one weight at a time."""
        if self.lora_rank:
            return 0  # adapters are small
        size = 4 * self.text.hidden * self.text.vocabulary  # the largest weight, in float32
        needed = 2 * size if name in ("adafactor", "muon") else 0
        if self.trained_bytes == 4:
            return needed
        # The weight, its gradient and moments in float32, and the random bits of the rounding.
        return needed + 2 * size + (2 * size if name == "adamw" else 0) + 4 * ROUNDED_AT_ONCE

    @property
    def value_bytes(self) -> int:
        """Bytes per value inside attention and MLP."""
        return 4 if self.precision == "float32" else 2

    @property
    def served_bytes(self) -> int:
        """Bytes of a server's weights, which it holds in the precision of the passes."""
        return self.num_weights * self.value_bytes


def _count_quantized(rows: int, columns: int, policy: PolicySettings) -> int:
    """Count the bytes of a matrix in 4 or 8 bits, with its scales (``model/loading.py``)."""
    weights = rows * columns
    if policy.load_in == "8bit":
        return weights + 4 * rows
    blocks = -(-weights // 64)
    # Doubly quantized, 256 scales have 8 bits each and share a scale themselves.
    scales = blocks + 4 * -(-blocks // 256) if policy.double_quant else 4 * blocks
    return -(-weights // 2) + scales
