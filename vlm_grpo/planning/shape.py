"""The sizes of a model that determine memory and time; needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vlm_grpo.config.optim import OptimizerName
from vlm_grpo.config.policy import Checkpointing, PolicySettings
from vlm_grpo.model.engine.limits import ROUNDED_AT_ONCE

Precision = Literal["float32", "bfloat16", "autocast"]
"""Precision of weights and computation; ``autocast``: float32 weights, bfloat16 computation."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer saves for its backward pass.

    Attributes:
        token: of each token, or patch of an image.
        fixed: whatever the number of tokens: casts of weights.
        mlp_token, mlp_fixed: of these two, what the feed-forward part saves.
        input: of each token of the layer's input.
        prompt: of each prompt token in addition.
        repeat: of each prompt token and each of its completions in addition.
    """

    token: int
    fixed: int
    mlp_token: int
    mlp_fixed: int
    input: int
    prompt: int = 0
    repeat: int = 0

    def count(self, tokens: int) -> int:
        return self.token * tokens + self.fixed

    def count_mlp(self, tokens: int) -> int:
        return self.mlp_token * tokens + self.mlp_fixed

    def count_kept(self, tokens: int, checkpointing: Checkpointing) -> int:
        """Count the bytes that are not recomputed."""
        if checkpointing == "full":
            return self.input * tokens
        return self.count(tokens) - self.count_mlp(tokens) * (checkpointing == "mlp")

    def extrapolate(self, other: LayerBytes, factor: float) -> LayerBytes:
        """Return the bytes on the line through these (factor 0) and others (factor 1)."""
        pairs = ((name, value, getattr(other, name)) for name, value in vars(self).items())
        return LayerBytes(**{name: int(a + (b - a) * factor) for name, a, b in pairs})


@dataclass(frozen=True)
class TextShape:
    """The language model: ``layers`` decoder layers with a gated MLP.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP; with a mixture of
            experts, of the experts that a token uses.
        intermediate_total: width of the MLP over all experts.
        heads, key_heads: numbers of query heads and of key heads.
        query, key: total widths of the queries and of the keys of all heads.
        qk_norm: whether queries and keys are normalized (Qwen3).
        fuses_norms: whether a GPU computes its norms by one kernel (``engine/norms.py``).
    """

    layers: int
    hidden: int
    intermediate: int
    intermediate_total: int
    heads: int
    key_heads: int
    query: int
    key: int
    vocabulary: int
    qk_norm: bool
    fuses_norms: bool = True

    @property
    def layer_weights(self) -> int:
        return 2 * self.hidden * (self.query + self.key) + self.mlp_weights

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of all layers."""
        wide, narrow = (
            (self.intermediate_total, self.hidden),
            (self.hidden, self.intermediate_total),
        )
        attention = [(self.query, self.hidden), *[(self.key, self.hidden)] * 2]
        return self.layers * [*attention, (self.hidden, self.query), wide, wide, narrow]

    @property
    def mlp_weights(self) -> int:
        return 3 * self.hidden * self.intermediate_total

    @property
    def weights_per_token(self) -> int:
        """Number of a layer's weights that a token is multiplied with."""
        unused = self.intermediate_total - self.intermediate
        return self.layer_weights - 3 * self.hidden * unused

    @property
    def adapter_widths(self) -> int:
        """Inputs plus outputs of a layer's linear modules: its adapters' weights per rank."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key)
        return attention + 3 * (self.hidden + self.intermediate)


@dataclass(frozen=True)
class VisionShape:
    """The vision tower: ``layers`` blocks over patches; ``merge`` patches become one token.

    Attributes:
        gated: whether the MLP has three matrices (Qwen2.5) instead of two.
        activation: the MLP's activation, by transformers' name.
        window: patches per attention window; None: attention is always over the full image.
        full_attention_layers: number of blocks with attention over the full image.
        patch_values: pixel values per patch.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    gated: bool
    activation: str
    window: int | None
    full_attention_layers: int
    patch_values: int
    merge: int

    @property
    def layer_weights(self) -> int:
        return 4 * self.hidden**2 + self.mlp_weights

    @property
    def mlp_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.intermediate


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine memory and time.

    Attributes:
        num_weights: number of weights without adapters; of them, those in all linear modules
            (``num_linear``) and in the ones that have adapters (``num_adapted``).
        num_trained: number of trained weights; with LoRA, of the adapters.
        shares_prompts: whether a group's completions share their prompt.
        lora_rank: mean rank of the adapters, with the initial factors; 0 for full weights.
        num_initial: number of an adapter's initial values, which are kept (PiSSA).
        has_norms: whether the norms of adapted rows are trained (DoRA).
        offloads: whether activations are kept in main memory.
        quantized_weights: number of weights held in 4 or 8 bits, in ``quantized_bytes`` with their
            scales; the largest of their matrices has ``largest_quantized``.
        state_bytes: bytes of the state of each optimizer.
        layer, block: what a decoder layer saves, and a block of a trained vision tower
            (``layers.py``); None: they are not measured.
    """

    name: str
    text: TextShape
    vision: VisionShape
    num_weights: int
    num_trained: int
    num_linear: int
    num_adapted: int
    shares_prompts: bool
    lora_rank: int
    trains_vision: bool
    head_frozen: bool
    precision: Precision
    checkpointing: Checkpointing = "none"
    offloads: bool = False
    quantized_weights: int = 0
    num_initial: int = 0
    has_norms: bool = False
    quantized_bytes: int = 0
    largest_quantized: int = 0
    state_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)
    layer: LayerBytes | None = None
    block: LayerBytes | None = None

    def recomputed_share(self, part: TextShape | VisionShape) -> float:
        """Return the share of a layer's products that the backward pass recomputes."""
        if self.checkpointing == "mlp":
            return part.mlp_weights / part.layer_weights
        return float(self.checkpointing == "full")

    def quantize(self, matrices: Sequence[tuple[int, int]], policy: PolicySettings) -> ModelShape:
        """Return the shape with matrices of these sizes held in 4 or 8 bits."""
        sizes = [rows * columns for rows, columns in matrices]
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
        """Count short-lived tensors of the optimizer's step, which takes one weight at a time.

        They are two of its size in float32 for Adafactor and Muon, and for weights in bfloat16 the
        weight, its gradient and its moments in float32, and the random bits of the rounding.
        """
        if self.lora_rank:
            return 0  # adapters are small
        size = 4 * self.text.hidden * self.text.vocabulary  # the largest weight
        needed = 2 * size if name in ("adafactor", "muon") else 0
        if self.trained_bytes == 4:
            return needed
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
    """Count the bytes of a matrix in 4 or 8 bits, with its scales (``model/quantization.py``)."""
    weights = rows * columns
    if policy.load_in == "8bit":
        return weights + 4 * rows
    blocks = -(-weights // 64)
    # Doubly quantized, 256 scales have 8 bits each and share a scale themselves.
    scales = blocks + 4 * -(-blocks // 256) if policy.double_quant else 4 * blocks
    return -(-weights // 2) + scales
