"""The settings of the optimizer, such as its learning rates and the prompts per step."""

import math
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from vlm_grpo.config.section import LOCKED, Frozen

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"]
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
"""A learning rate schedule, by transformers' ``lr_scheduler_type``."""
WarmupSteps = Annotated[
    NonNegativeInt | Annotated[float, Field(gt=0, lt=1)], Field(union_mode="left_to_right")
]
"""A number of steps, or below 1, as in transformers, a share of all steps, rounded up."""

DEFAULT_UPDATE_TOKENS = 16_384
"""Tokens in a micro-batch of the update on a CPU, and at most in the first update on a GPU."""
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Frozen):
    """The optimizer, its learning rate schedule, and the size of a step."""

    name: Annotated[OptimizerName, LOCKED] = "adamw"
    """``adamw``; ``adamw_8bit``: its moments in 8 bits by bitsandbytes (the extra
    ``quantization``); ``paged_adamw_8bit``: these move to main memory when the GPU's is full;
    ``adafactor``: a factored second moment and no first (transformers, with ``lr`` as it is);
    ``muon``: orthogonalized momentum for the matrices of the layers, ``adamw`` for the rest."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    lr_vision: float | None = Field(default=None, ge=0)
    """Peak learning rate of the vision tower; None: ``lr``."""
    lr_projector: float | None = Field(default=None, ge=0)
    """Peak learning rate of the projector; None: ``lr``."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; 0: none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments (``muon``: for its other weights)."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's term that prevents division by zero."""
    schedule: Schedule | Literal["cosine_with_min_lr"] = "constant_with_warmup"
    """Learning rate schedule, by transformers' ``lr_scheduler_type``."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of ``cosine_with_min_lr``; 0 with the other schedules."""
    warmup_steps: WarmupSteps = 0
    """Number of steps in which the learning rate rises to its peak; below 1: as a share of all
    steps; 0: no warmup."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Maximum gradient norm, to which larger gradients are scaled down; 0: no clipping."""
    max_steps: int = Field(default=500, ge=1)
    """Number of steps of the run, those of a warm start included; one step is one rollout and its
    updates, or one update on gold answers."""
    num_train_epochs: float | None = Field(default=None, gt=0)
    """End after as many prompts as this many passes over the training examples have, instead of
    after ``max_steps``, which must be null; None: after ``max_steps``."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts per step over all devices, each with num_generations completions."""
    mini_batches: int = Field(default=1, ge=1)
    """Number of parts into which the groups of a step are divided, with an update on each; must
    divide ``prompts_per_step``. 1: each update is on the whole step."""
    max_tokens_per_batch: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a micro-batch of the update; does not change the gradient. None:
    on a GPU as many as fit, at most 65,536, by what the first update takes; 16,384 on a CPU."""

    @property
    def part_rates(self) -> dict[str, float]:
        rates = {"vision": self.lr_vision, "projector": self.lr_projector}
        return {part: rate for part, rate in rates.items() if rate is not None}


def count_warmup(warmup_steps: float, steps: int) -> int:
    """Return the number of steps of a warmup, given as a number or as a share of ``steps``."""
    return math.ceil(warmup_steps * steps) if warmup_steps < 1 else int(warmup_steps)


def fit_optim(given: dict[str, Any], user_keys: Collection[str]) -> str | None:
    """Drop the recipe's steps, epochs and betas where the user's settings exclude them. Shorten its
    warmup to the user's steps after a warm start, and return a warning."""
    optim = given.get("optim")
    if not isinstance(optim, dict):
        return None
    lengths = ("max_steps", "num_train_epochs")
    for own, other in (lengths, lengths[::-1]):
        if f"optim.{own}" in user_keys and f"optim.{other}" not in user_keys:
            optim.pop(other, None)
    if optim.get("max_steps", 0) is None:  # as written for num_train_epochs
        del optim["max_steps"]
    is_chosen = "optim.name" in user_keys and "optim.betas" not in user_keys
    if is_chosen and optim["name"] == "adafactor":  # which has none
        optim.pop("betas", None)
    steps = optim.get("max_steps")
    if "optim.max_steps" not in user_keys or not isinstance(steps, int):
        return None
    start, place = given.get("warm_start"), f"optim.max_steps={steps}"
    supervised = start.get("steps") if isinstance(start, dict) else None
    if isinstance(supervised, int) and 0 < supervised < steps:
        steps -= supervised
        place = f"the {steps} steps of {place} after those of warm_start"
    notes = []
    for name in ("optim", "warm_start") if supervised == "all" else ("optim",):
        key, warmup = f"{name}.warmup_steps", given[name].get("warmup_steps", 0)
        if key not in user_keys and isinstance(warmup, int) and 0 < steps < warmup:
            given[name]["warmup_steps"] = steps
            notes.append(f"{key}={warmup} of the recipe is shortened to {place}")
    return "; ".join(notes) or None
