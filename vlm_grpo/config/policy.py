"""Settings of the policy: how its model is loaded, and which parts are trained."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vlm_grpo.config.section import FREE, Frozen

ModelPart = Literal["vision", "projector", "language"]


def _name_switch(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _name_initial_weights(value: Any) -> Any:
    if value in ("eva", "corda", "loftq", "lora_ga"):
        raise ValueError(
            f"{value} is not computed here, because it needs data or other weights before the run: "
            "initialize the adapter with PEFT, save it, and start from its folder "
            "(policy.lora.adapter)"
        )
    return "default" if value is True else value


Checkpointing = Literal["none", "mlp", "full"]
"""Activations that are recomputed."""


class LoraSettings(Frozen):
    """Low-rank adapters, trained instead of the full weights. Names and meanings follow PEFT's
    LoraConfig."""

    r: int = Field(default=64, ge=1)
    """Rank."""
    alpha: int = Field(default=128, ge=1)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Must be 0: with dropout, completions could not share one pass over their prompt."""
    target: Literal["language", "all"] | tuple[str, ...] = "language"
    """Adapted linear layers: those in the language model, ``all`` (vision tower and projector too),
    or module-name suffixes such as ``[q_proj, v_proj]``."""
    use_rslora: bool = False
    """Multiply the adapter's output by alpha / √r instead, so that a larger r needs no larger
    learning rate (rsLoRA)."""
    use_dora: bool = False
    """Train the norm of each row of the adapted weights separately (DoRA)."""
    init_lora_weights: Annotated[
        Literal["default", "gaussian", "orthogonal"], BeforeValidator(_name_initial_weights)
    ] = "default"
    """Initial values: ``default`` (or true, as in PEFT), ``gaussian`` and ``orthogonal`` do not
    change the model's output."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full beside the adapters, by the end of their names, such as the
    projector; empty: none."""
    adapter: str | None = None
    """Folder of a trained adapter that the training starts from, with the same settings; None: a
    new adapter."""


class PolicySettings(Frozen):
    """The model: how it is loaded, which parts are trained, and how its images are resized."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the forward and backward passes."""
    master_weights: Literal["float32", "bfloat16"] = "float32"
    """Precision in which full weights are kept; ``bfloat16``: half the memory for weights,
    gradients and moments, with stochastic rounding, so that small updates are not lost."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Enlarge images to at least this many pixels; None: the processor's default."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Shrink images, and each frame of a video, to at most this many pixels; None: the processor's
    default."""
    max_video_pixels: int = Field(default=3584 * 28 * 28, ge=1)
    """Shrink a video's frames so that all of them together have at most this many pixels, but none
    to less than ``min_pixels``. Two frames share their tokens."""
    freeze: tuple[ModelPart, ...] = ()
    """Parts whose weights are not trained (full-weight training only)."""
    lora: LoraSettings | None = None
    """Train low-rank adapters; None: full weights."""
    load_in: Literal["none", "4bit", "8bit"] = "none"
    """Hold frozen weights in 4 or 8 bits, by bitsandbytes; adapters are trained on them (QLoRA).
    ``none``: hold them in ``dtype``."""
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values of 4 bits: those of normally distributed weights (``nf4``), or floating-point
    numbers (``fp4``)."""
    double_quant: bool = True
    """Hold the scales of 4-bit weights in 8 bits too, which saves 0.37 bits per weight."""
    gradient_checkpointing: Annotated[
        Checkpointing | Literal["auto"], BeforeValidator(_name_switch), FREE
    ] = "none"
    """Recompute activations instead of storing them: ``mlp``: those of the feed-forward layers,
    which are about two thirds; ``full`` (or true): all but each layer's input, about a third
    slower; ``none`` (or false): store all; ``auto``: store all until the update runs out of memory
    with micro-batches of 4,096 tokens, then ``mlp``, then ``full``; with sharded weights, ``full``.
    """
    activation_offloading: Annotated[bool, FREE] = False
    """Keep stored activations in the host's memory until the backward pass needs them (GPUs only).
    """
    trust_remote_code: Annotated[bool, FREE] = False
    """Run the Python code that comes with a model."""
    engine: Annotated[Literal["auto", "shared", "repeated"], FREE] = "auto"
    """``shared``: completions share one pass over their prompt; ``repeated``: each repeats it;
    ``auto``: shared if the model family supports it."""
    head_chunk_tokens: Annotated[int, FREE] = Field(default=1024, ge=0)
    """Number of tokens whose logits are computed at once in the update; 0: all of a micro-batch."""
