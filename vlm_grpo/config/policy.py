"""Settings of the policy: how its model is loaded, what of it is trained, how it is sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from vlm_grpo.config.base import Frozen

ModelPart = Literal["vision", "projector", "language"]


class LoraSettings(Frozen):
    """Low-rank adapters in place of full weights."""

    r: int = Field(default=64, ge=1)
    """Rank."""
    alpha: int = Field(default=128, ge=1)
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Must be 0: with dropout the completions of one prompt no longer share one prefix."""
    target: Literal["language", "all"] | tuple[str, ...] = "language"
    """Linear layers of the language model, of the whole model (vision tower and projector too),
    or module-name suffixes such as ``[q_proj, v_proj]``."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "must be 0: dropout draws other masks for each pass, so that the old and new "
                "log-probs of one policy differ and completions cannot share their prompt's pass"
            )
        return value

    @field_validator("target")
    @classmethod
    def _some_target(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("names no module: use language, all, or module-name suffixes")
        return value


class PolicySettings(Frozen):
    """How the model is loaded, what of it is trained, and how it sees images."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the forward and backward passes."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Images are enlarged to at least so many pixels; None: the model's own processor decides."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Images are shrunk to at most so many pixels; None: the model's own processor decides."""
    freeze: tuple[ModelPart, ...] = ()
    """Parts whose weights stay as they are (full-weight training only)."""
    lora: LoraSettings | None = None
    """Train low-rank adapters; None: full weights."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third slower."""
    trust_remote_code: bool = False
    """Run the Python code that a model's folder brings along."""
    engine: Literal["auto", "shared", "repeated"] = "auto"
    """Completions share one pass over their prompt, repeat it, or share it where the family can."""
    head_chunk_tokens: int = Field(default=1024, ge=0)
    """Tokens whose logits are held at once in the update; 0: all of a micro-batch."""

    @model_validator(mode="after")
    def _no_idle_settings(self) -> PolicySettings:
        if self.lora is not None and self.freeze:
            raise ValueError(
                "policy.freeze has no effect with policy.lora, which freezes every base weight: "
                "choose the adapted layers by policy.lora.target"
            )
        if len(set(self.freeze)) == 3:
            raise ValueError("policy.freeze names every part: nothing is left to train")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"policy.min_pixels={self.min_pixels} exceeds max_pixels={self.max_pixels}"
            )
        return self


class RolloutSettings(Frozen):
    """How completions are sampled. Names and meanings are those of TRL's GRPOConfig."""

    num_generations: int = Field(default=8, ge=2)
    """G, completions of each prompt; a group of one has no advantage."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampling distribution, which is also the one that is trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together reach this probability; 1: from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0: from all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens at least this likely relative to the likeliest; None: from all."""
    max_completion_length: int = Field(default=256, ge=1)
    """Tokens after which a completion is cut off."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Tokens before which no completion may end; 0: it may end at once."""
    stop: tuple[str, ...] = ()
    """Strings after which a completion ends; empty: the end-of-sequence token alone ends it."""
    max_tokens_per_batch: int = Field(default=65_536, ge=1)
    """Tokens, prompts and completions, that are generated at once."""
    cuda_graphs: bool = False
    """Start all kernels of a decoding step at once; False: one by one from Python."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of fresh prompts."""
    max_resample: int | None = Field(default=None, ge=1)
    """Rounds of such replacement in a step; None: 3 (dynamic_sampling only)."""
    reward_timeout: float | None = Field(default=10.0, gt=0)
    """Seconds that one reward may take for one completion, which is unscorable after that (as where
    a reward raises); None: any time."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that score completions, for slow rewards and for those that hang in compiled code
    or end their process; 0: the training process, which can interrupt Python code only."""

    @model_validator(mode="after")
    def _no_idle_settings(self) -> RolloutSettings:
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
            raise ValueError("rollout.stop holds an empty string, which would stop at once")
        return self
