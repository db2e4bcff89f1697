"""Sizes of a model and of a step that determine memory and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vlm_grpo.config.optim import DEFAULT_UPDATE_TOKENS, OptimizerName
from vlm_grpo.config.policy import Checkpointing
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings
from vlm_grpo.model.engine.packing import ROUNDED_AT_ONCE, GroupSlice, pack
from vlm_grpo.types import Example, Prompt

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
    lora_rank: int  # rank of the adapters; 0 for full weights
    trains_vision: bool
    head_frozen: bool
    precision: Precision
    checkpointing: Checkpointing = "none"
    offloads: bool = False  # whether activations are kept in main memory
    quantized_weights: int = 0  # number of weights held in 4 or 8 bits
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


@dataclass(frozen=True)
class PromptSize:
    """The size of one prompt."""

    tokens: int  # including image tokens
    image_tokens: int
    values: int  # pixel values that the vision tower receives
    pixels: int
    results: int = 0  # what an episode observes, at most; 0: there is no environment
    result_tokens: int = 0  # of each, including image tokens
    result_images: int = 0  # the number of image tokens
    result_values: int = 0


@dataclass(frozen=True)
class Workload:
    """One step on one device, with equal prompts.

    In the repeated form each completion has a copy of the prompt: its step is that of G times as
    many prompts with one completion each, except for its micro-batches.
    """

    num_prompts: int  # per step on this device, counting copies
    num_generations: int  # completions per copy of a prompt: G, and 1 in the repeated form
    prompt_tokens: int
    patches: int  # image patches per prompt, before merging
    completion_tokens: int
    rollout_budget: int  # largest number of tokens generated at once
    update_budget: int  # the same in a micro-batch of the update
    head_chunk_tokens: int  # tokens whose logits are computed at once in the update; 0: all
    iterations: int = 1
    uses_reference: bool = False
    reference_on_host: bool = False
    image_tokens: int = 0  # of a prompt
    image_pixels: int = 0  # of a prompt's resized images
    copies: int = 1  # of each prompt: 1, and G in the repeated form
    optimizer: OptimizerName = "adamw"
    mini_batches: int = 1
    teacher_weights: int = 0  # number of weights of the models of methods; 0: there is none
    extra_copies: int = 0  # of the trained weights, which methods keep
    extra_passes: int = 0  # of all completions for other images, as methods make
    views: int = 1  # forms of a prompt that a group is sampled for: with some methods more than 1
    # what an episode observes: its results, and the tokens, patches and image tokens of each
    results: int = 0
    result_tokens: int = 0
    result_patches: int = 0
    result_image_tokens: int = 0

    @property
    def num_groups(self) -> int:
        return self.num_prompts // self.copies

    @property
    def observed_tokens(self) -> int:
        return self.results * self.result_tokens

    @property
    def path_tokens(self) -> int:
        """Number of tokens behind a prompt: those sampled and observed in a completion."""
        return self.completion_tokens + self.observed_tokens

    @property
    def observed_patches(self) -> int:
        """Number of patches that all completions observe, if no two images are equal."""
        return self.num_prompts * self.num_generations * self.results * self.result_patches

    @property
    def concurrent_prompts(self) -> int:
        row = self.views * self.prompt_tokens + self.num_generations * self.path_tokens
        return min(self.num_prompts, max(1, self.rollout_budget // row))

    @property
    def continued(self) -> int:
        """Number of episodes at once after the first turn, where each has its prompt's keys."""
        most = max(1, self.rollout_budget // (self.prompt_tokens + self.path_tokens))
        return min(self.num_prompts * self.num_generations, most) if self.results else 0

    @cached_property
    def _batches(self) -> list[tuple[int, int]]:
        """The numbers of prompts, counting copies, and of completions in each micro-batch of a
        mini-batch."""
        prompt = Prompt(Example("", (), "", None), "", (0,) * self.prompt_tokens, {})
        rows = tuple(range(self.num_generations * self.copies))
        completion = (0,) * self.path_tokens
        group = GroupSlice(prompt, (completion,) * len(rows), rows)
        batches = pack([group] * math.ceil(self.num_groups / self.mini_batches), self.update_budget)
        sizes = [(len(batch.slices), len(batch.rows)) for batch in batches]
        return sizes if self.copies == 1 else [(rows, rows) for _, rows in sizes]

    def _count_tokens(self, prompts: int, completions: int) -> int:
        return prompts * self.prompt_tokens + completions * (self.path_tokens - 1)

    @property
    def num_micro_batches(self) -> int:
        return self.mini_batches * len(self._batches)

    @property
    def micro_tokens(self) -> int:
        return max(self._count_tokens(*batch) for batch in self._batches)

    @property
    def micro_rows(self) -> tuple[int, int, int]:
        """Arguments of ``LayerBytes.count`` for the largest micro-batch."""
        completions = max(-(-rows // prompts) for prompts, rows in self._batches)
        return self.micro_tokens, self._micro_prompts * self.prompt_tokens, completions

    @property
    def micro_patches(self) -> int:
        rows = max(completions for _, completions in self._batches)
        return self._micro_prompts * self.patches + rows * self.results * self.result_patches

    @property
    def micro_completion_tokens(self) -> int:
        return max(completions for _, completions in self._batches) * self.completion_tokens

    @property
    def update_tokens(self) -> int:
        """Tokens in all micro-batches; a group split over several repeats its prompt in each."""
        return self.mini_batches * sum(self._count_tokens(*batch) for batch in self._batches)

    @property
    def _micro_prompts(self) -> int:
        return max(prompts for prompts, _ in self._batches)


def estimate_workload(
    settings: Settings,
    prompt: PromptSize,
    model: ModelShape,
    devices: int = 1,
    teacher_weights: int = 0,
) -> Workload:
    """Return the workload of a step whose prompts are divided among devices."""
    rollout, optim = settings.rollout, settings.optim
    copies = 1 if model.shares_prompts else rollout.num_generations
    teaching = sum(own.extra_model == "" for own in settings.used_methods)
    return Workload(
        num_prompts=math.ceil(optim.prompts_per_step / devices) * copies,
        num_generations=rollout.num_generations // copies,
        prompt_tokens=prompt.tokens,
        patches=prompt.values // model.vision.patch_values,
        image_tokens=prompt.image_tokens,
        completion_tokens=rollout.max_completion_length,
        rollout_budget=rollout.max_tokens_per_batch or DEFAULT_ROLLOUT_TOKENS,
        update_budget=optim.max_tokens_per_batch or DEFAULT_UPDATE_TOKENS,
        head_chunk_tokens=settings.policy.head_chunk_tokens if model.shares_prompts else 0,
        iterations=settings.objective.num_iterations,
        uses_reference=settings.objective.needs_reference,
        reference_on_host=settings.objective.reference_device == "cpu",
        image_pixels=prompt.pixels,
        copies=copies,
        optimizer=optim.name,
        mini_batches=optim.mini_batches,
        teacher_weights=teacher_weights,
        extra_copies=teaching,
        extra_passes=teaching + sum(own.extra_passes for own in settings.used_methods),
        views=1 + sum(own.extra_views for own in settings.used_methods),
        results=prompt.results,
        result_tokens=prompt.result_tokens,
        result_patches=prompt.result_values // model.vision.patch_values,
        result_image_tokens=prompt.result_images,
    )
