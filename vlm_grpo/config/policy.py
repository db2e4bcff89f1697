"""Settings of the policy: how its model is loaded, which parts are trained, how it is sampled."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vlm_grpo.config.section import Frozen
from vlm_grpo.config.vllm import CHOOSE_SERVERS, VllmSettings
from vlm_grpo.media.image_noise import MAX_NOISE_STEPS

DEFAULT_ROLLOUT_TOKENS = 65_536
"""Number of tokens cached at once where free memory is not known."""
ModelPart = Literal["vision", "projector", "language"]


def _name_switch(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["none", "mlp", "full"], BeforeValidator(_name_switch)]
"""Activations that are recomputed; true and false, as in TRL, mean full and none."""


def _name_default(value: Any) -> Any:
    return "default" if value is True else value


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
    init_lora_weights: Annotated[str, BeforeValidator(_name_default)] = "default"
    """Initial values: ``default`` (or true, as in PEFT), ``gaussian`` and ``orthogonal`` do not
    change the model's output; ``pissa``, ``pissa_niter_16`` (a fast approximation of it) and
    ``olora`` are the main directions of the base weights, and leave these as they are."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Ranks of layers that differ from r, by the end of the layers' names, or a regular expression
    for it; empty: none."""
    alpha_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The same for alpha; empty: none."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full beside the adapters, by the end of their names, such as the
    projector; empty: none."""
    adapter: str | None = None
    """Folder of a trained adapter that the training starts from, with the same settings; None: a
    new adapter."""

    @property
    def starts_from_base(self) -> bool:
        """Return whether the adapter is initialized from the base weights."""
        return self.init_lora_weights.startswith(("pissa", "olora"))

    @property
    def patterns(self) -> dict[str, dict[str, int]]:
        """Return the patterns of ranks and of alphas by the names of the settings."""
        return {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "must be 0: each pass draws a new dropout mask, so the old and new log-probs of a "
                "policy would differ, and completions could not share their prompt's pass"
            )
        return value

    @field_validator("init_lora_weights")
    @classmethod
    def _check_init(cls, value: str) -> str:
        if value.lower() in ("eva", "corda", "loftq", "lora_ga"):
            raise ValueError(
                f"{value} is not computed here, because it needs data or other weights before the "
                "run: initialize the adapter with PEFT, save it, and start from its folder "
                "(policy.lora.adapter)"
            )
        if not re.fullmatch(r"default|gaussian|orthogonal|olora|pissa(_niter_\d+)?", value):
            raise ValueError(
                "must be default, gaussian, orthogonal, pissa, pissa_niter_N (N: a number of "
                "iterations, such as 16) or olora"
            )
        return value

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _check_patterns(cls, value: dict[str, int]) -> dict[str, int]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> LoraSettings:
        kind = self.init_lora_weights
        if self.adapter is not None and kind != "default":
            raise ValueError(
                f"policy.lora.init_lora_weights={kind} has no effect on the adapter that "
                "policy.lora.adapter loads: remove one of them"
            )
        if self.starts_from_base and self.use_dora:
            raise ValueError(
                f"policy.lora.init_lora_weights={kind} and policy.lora.use_dora=true exclude each "
                "other: DoRA starts from the norms of the base weights"
            )
        ranks = {self.r, *self.rank_pattern.values()}
        if kind == "orthogonal" and any(rank % 2 for rank in ranks):
            raise ValueError("policy.lora.init_lora_weights=orthogonal needs an even r")
        return self

    @field_validator("target")
    @classmethod
    def _check_target(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("names no module: use language, all, or module-name suffixes")
        return value


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
    quantized_parts: tuple[ModelPart, ...] = ("language",)
    """Parts whose linear layers ``load_in`` applies to; embeddings and the output head are never
    quantized."""
    gradient_checkpointing: Checkpointing = "none"
    """Recompute activations instead of storing them: ``mlp``: those of the feed-forward layers,
    which are about two thirds; ``full`` (or true): all but each layer's input, about a third
    slower; ``none`` (or false): store all."""
    activation_offloading: bool = False
    """Keep stored activations in the host's memory until the backward pass needs them (GPUs only).
    """
    trust_remote_code: bool = False
    """Run the Python code that comes with a model."""
    engine: Literal["auto", "shared", "repeated"] = "auto"
    """``shared``: completions share one pass over their prompt; ``repeated``: each repeats it;
    ``auto``: shared if the model family supports it."""
    head_chunk_tokens: int = Field(default=1024, ge=0)
    """Number of tokens whose logits are computed at once in the update; 0: all of a micro-batch."""

    @model_validator(mode="after")
    def _check_combinations(self) -> PolicySettings:
        if self.lora is not None and self.freeze:
            raise ValueError(
                "policy.freeze has no effect with policy.lora, which freezes every base weight: "
                "choose the adapted layers with policy.lora.target"
            )
        if self.master_weights == "bfloat16" and self.lora is not None:
            raise ValueError(
                "policy.master_weights has no effect with policy.lora: base weights are in "
                "policy.dtype and adapters in float32: remove it"
            )
        if self.master_weights == "bfloat16" and self.dtype == "float32":
            raise ValueError(
                "policy.master_weights=bfloat16 cannot be computed with in policy.dtype=float32: "
                "set policy.dtype=bfloat16"
            )
        unused = {"4bit": (), "8bit": ("quant_type", "double_quant")}
        names = unused.get(self.load_in, (*unused["8bit"], "quantized_parts"))
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"policy.{name} has no effect with policy.load_in={self.load_in}: remove it"
                )
        if not self.quantized_parts:
            raise ValueError("policy.quantized_parts names no part: use policy.load_in=none")
        if len(set(self.freeze)) == 3:
            raise ValueError("policy.freeze lists every part: nothing is left to train")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"policy.min_pixels={self.min_pixels} exceeds max_pixels={self.max_pixels}"
            )
        return self


class NoiseSettings(Frozen):
    """NoisyRollout (Liu et al., arXiv:2504.13055): a part of each group is sampled behind images
    with Gaussian noise, and the update scores it behind the clean ones. Defaults are those of the
    authors' run on Geometry3K."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of a group's completions sampled behind noise, rounded; one at least is, one is not."""
    strength: int = Field(default=500, ge=1, le=MAX_NOISE_STEPS)
    """Diffusion steps of the noise at first, α₀; 500 leave 74 % of an image's variance."""
    midpoint: float = Field(default=2 / 3, gt=0)
    """Share of the run after which the strength is half, γ; well above 1: it does not fall."""
    steepness: float = Field(default=30.0, gt=0)
    """How fast the strength falls about the midpoint, λ."""

    def anneal(self, progress: float) -> int:
        """Return the strength after a share of the run: ⌊α₀ · (1 − σ(λ · (progress − γ)))⌋."""
        gate = math.tanh(self.steepness * (progress - self.midpoint) / 2)  # 2 σ − 1
        return int(self.strength * (1 - gate) / 2)

    def count(self, num_generations: int) -> int:
        """Return how many of a group's completions are sampled behind noise."""
        return min(max(1, math.floor(self.share * num_generations + 0.5)), num_generations - 1)


class RolloutSettings(Frozen):
    """The sampling of completions. Names and meanings follow TRL's GRPOConfig."""

    sampler: Literal["policy", "vllm"] = "policy"
    """``policy``: this process samples, with the weights that are trained; ``vllm``: vLLM servers
    do, which get the weights after each step."""
    steps_ahead: Literal[0, 1, 2] = 0
    """Number of steps whose completions are generated while an earlier step's update runs, with
    weights that are as many steps old; 0: generation and update take turns (vllm only)."""
    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt, G; a group of one has no advantage."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the distribution that is sampled from and trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities sum to this value; 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this fraction of the likeliest token's probability; None:
    all tokens."""
    max_completion_length: int = Field(default=256, ge=1)
    """Maximum number of tokens per completion; longer ones are truncated."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens per completion; 0: no minimum."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; empty: only the end-of-sequence token ends it."""
    max_tokens_per_batch: int | None = Field(default=None, ge=1)
    """Maximum number of prompt and completion tokens in one generation batch; None: as many as fit
    into the GPU's free memory, 65,536 on a CPU."""
    cuda_graphs: bool | None = None
    """Replay decode steps as CUDA graphs; None: on a GPU, if prompts are shared, weights are not
    sharded and RoPE is not of type dynamic; False: launch each kernel from Python. Each rollout
    captures them again if it copies weights: all those trained in bfloat16 from float32 without an
    adapter, and float32 or quantized ones under an adapter."""
    torch_compile: bool = False
    """Fuse the kernels of captured decode steps with ``torch.compile``, which the first rollout
    waits for."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with groups of new prompts."""
    max_resample: int | None = Field(default=None, ge=1)
    """Maximum rounds of replacement per step; None: 3 (dynamic_sampling only)."""
    noise: NoiseSettings | None = None
    """Sample a part of each group behind images with noise; None: all of it behind clean images."""
    vllm: VllmSettings | None = None
    """The vLLM servers (``rollout.sampler=vllm`` only); None: there are none."""
    reward_timeout: float | None = Field(default=10.0, gt=0)
    """Time limit in seconds of one reward for one completion, which is unscorable after a timeout
    or an error. None: no limit."""
    reward_workers: int = Field(default=0, ge=0)
    """Number of processes that score completions, for rewards that are slow, hang in compiled code,
    or end their process; 0: the training process, which can only interrupt Python code."""

    @model_validator(mode="after")
    def _check_combinations(self) -> RolloutSettings:
        uses_vllm = self.sampler == "vllm"
        if uses_vllm and self.vllm is None:
            raise ValueError(f"rollout.sampler=vllm needs servers: {CHOOSE_SERVERS}")
        if self.vllm is not None and not uses_vllm:
            raise ValueError("rollout.vllm has no effect without rollout.sampler=vllm: add it")
        if self.steps_ahead and not uses_vllm:
            raise ValueError(
                f"rollout.steps_ahead={self.steps_ahead} needs rollout.sampler=vllm: the policy "
                "cannot sample while it is updated"
            )
        if self.torch_compile and (uses_vllm or self.cuda_graphs is False):
            raise ValueError(
                "rollout.torch_compile=true compiles the steps that the policy captures, which "
                "rollout.sampler=vllm and rollout.cuda_graphs=false leave out: remove it"
            )
        if self.vllm is not None:
            self.vllm.check_steps_ahead(self.steps_ahead)
        if self.max_resample is not None and not self.dynamic_sampling:
            raise ValueError(
                "rollout.max_resample has no effect without rollout.dynamic_sampling=true"
            )
        if self.min_new_tokens > self.max_completion_length:
            raise ValueError(
                f"rollout.min_new_tokens={self.min_new_tokens} exceeds "
                f"rollout.max_completion_length={self.max_completion_length}"
            )
        if "" in self.stop:
            raise ValueError(
                "rollout.stop has an empty string, which would end every completion at once"
            )
        return self
