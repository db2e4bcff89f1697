"""What a model's configuration says of its size; no weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.families import Family, load_family
from vlm_grpo.model.loading import apply_lora_or_freeze, get_model_source

Precision = Literal["float32", "bfloat16", "autocast"]
"""Of weights and computation; ``autocast``: float32 weights, computation in bfloat16."""


@dataclass(frozen=True)
class TextShape:
    """The language model: ``layers`` decoder layers with a gated feed-forward part.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the feed-forward part.
        query, key: widths of all heads' queries, and of all heads' keys.
        heads, key_heads: numbers of query and of key heads.
        vocabulary: rows of the output head.
        normed_heads: queries and keys pass a norm of their own (Qwen3).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    query: int
    key: int
    vocabulary: int
    normed_heads: bool

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's linear maps."""
        return 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.intermediate

    @property
    def adapter_widths(self) -> int:
        """Inputs and outputs of a layer's linear maps: the weights of its adapters at rank 1."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key)
        return attention + 3 * (self.hidden + self.intermediate)


@dataclass(frozen=True)
class VisionShape:
    """The vision tower: ``layers`` blocks over patches, ``merge`` of which become one token.

    Attributes:
        gated: the feed-forward part has three matrices (Qwen2.5), not two.
        activations: tensors of the intermediate width that a feed-forward part keeps for its
            backward pass.
        window: patches that see one another in most blocks; None: all of the image do, in all.
        full: blocks in which all patches of an image see one another.
        patch_values: numbers of a patch's pixels.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    gated: bool
    activations: int
    window: int | None
    full: int
    patch_values: int
    merge: int

    @property
    def layer_weights(self) -> int:
        matrices = 3 if self.gated else 2
        return 4 * self.hidden**2 + matrices * self.hidden * self.intermediate


@dataclass(frozen=True)
class ModelShape:
    """A model as the plan sees it.

    Attributes:
        name: model type and number of weights, for people.
        text, vision: its two towers.
        weights: number of weights.
        trained: how many of them the settings train; adapters' weights with LoRA.
        linear: weights of all linear maps.
        adapted: those of the maps that carry adapters.
        rank: rank of the adapters; 0 for full weights.
        trains_vision: the vision tower's activations are kept for a backward pass.
        head_frozen: the output head is not trained.
        precision: see ``Precision``.
        checkpointing: only each layer's input is kept for the backward pass.
    """

    name: str
    text: TextShape
    vision: VisionShape
    weights: int
    trained: int
    linear: int
    adapted: int
    rank: int
    trains_vision: bool
    head_frozen: bool
    precision: Precision
    checkpointing: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight of the model."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def value_bytes(self) -> int:
        """Bytes of one number inside an attention or a feed-forward part."""
        return 4 if self.precision == "float32" else 2


def load_config(settings: Settings) -> Any:
    """The model's configuration: a file of a few kilobytes, from its folder or the hub.

    Raises:
        UserError: it cannot be loaded.
    """
    try:
        return AutoConfig.from_pretrained(
            get_model_source(settings.model),
            trust_remote_code=settings.policy.trust_remote_code,
            revision=settings.model_revision or "main",
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model {settings.model} cannot be loaded: {error}") from error


def read_shape(config: Any, policy: PolicySettings) -> tuple[ModelShape, Family]:
    """The shape of the model that a configuration describes, under a policy's settings.

    The model is built on torch's meta device, which holds no numbers, so all counts are exact.

    Raises:
        UserError: the family has no shared-prefix form, which is what the plan models.
    """
    family = load_family(config)
    why_not = family.why_not_shared(config)
    if policy.engine == "repeated":
        why_not = "policy.engine=repeated"
    if why_not is not None:
        raise UserError(f"the plan knows only the shared-prefix form: {why_not}")
    # Not accelerate's init_empty_weights, which parts weights that are tied and counts them twice.
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
        weights = sum(weight.numel() for weight in model.parameters())
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        apply_lora_or_freeze(model, family, policy)
    trained = [(n, w) for n, w in model.named_parameters() if w.requires_grad]
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    vision = family.parts["vision"]
    precision: Precision = "float32"
    if policy.dtype == "bfloat16":
        precision = "bfloat16" if policy.lora is not None else "autocast"
    shape = ModelShape(
        name=f"{config.model_type}, {weights:,} weights",
        text=_text(config.get_text_config()),
        vision=_vision(config.vision_config),
        weights=weights,
        trained=sum(weight.numel() for _, weight in trained),
        linear=linear,
        adapted=sum(layer.get_base_layer().weight.numel() for layer in layers),
        rank=policy.lora.r if policy.lora is not None else 0,
        trains_vision=any(name.startswith(vision) for name, _ in trained),
        head_frozen=not model.get_output_embeddings().weight.requires_grad,
        precision=precision,
        checkpointing=policy.gradient_checkpointing,
    )
    return shape, family


def _text(config: Any) -> TextShape:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TextShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        query=config.num_attention_heads * width,
        key=config.num_key_value_heads * width,
        vocabulary=config.vocab_size,
        normed_heads=config.model_type.startswith("qwen3"),
    )


def _vision(config: Any) -> VisionShape:
    hidden = getattr(config, "embed_dim", None) or config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or int(hidden * config.mlp_ratio)
    full = getattr(config, "fullatt_block_indexes", None)
    gated = full is not None
    window = None
    if full is not None:
        window = (config.window_size // config.patch_size) ** 2
    # x · sigmoid(1.702 x), Qwen2's, keeps the sigmoid besides what goes in and comes out.
    quick = getattr(config, "hidden_act", "") == "quick_gelu"
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
    return VisionShape(
        layers=config.depth,
        hidden=hidden,
        intermediate=intermediate,
        heads=config.num_heads,
        gated=gated,
        activations=4 if gated else 3 if quick else 2,
        window=window,
        full=config.depth if full is None else len(full),
        patch_values=channels * config.temporal_patch_size * config.patch_size**2,
        merge=config.spatial_merge_size**2,
    )
