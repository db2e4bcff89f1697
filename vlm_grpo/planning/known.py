"""Plans of models whose shapes the package knows: without their files, a network or torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.recipes import Overrides, build_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.planning.devices import find_device
from vlm_grpo.planning.plan import CARDS, COUNTED_LATER, StepPlanner, Weights
from vlm_grpo.planning.sizes import LayerBytes, ModelShape, PromptSize

IMAGE_TOKENS, TEXT_TOKENS = 1000, 100
"""Tokens of the only image, and of the text, of an assumed prompt."""
TABLE_CARDS = (12, 16, 24, 48, 80, 141)  # memory of the GPUs in a table, in GB
TABLE_GENERATIONS = 64  # the largest group that is tried in a table
TABLE_KINDS = {
    "LoRA, 4 bits": ("policy.lora.r=64", "policy.load_in=4bit"),
    "LoRA": ("policy.lora.r=64",),
    "full": (),
}
"""The rows of each model in a table, and their settings."""
_RANK = 64  # of the stored shapes
_COUNTED = (*COUNTED_LATER, "master_weights", "load_in", "quant_type", "double_quant")
"""Settings of the policy that do not change a stored shape, or are counted on it."""


@cache
def load_known_models() -> dict[str, Any]:
    """Return the known models by name (written by ``perf/known_models.py``)."""
    return json.loads(files("vlm_grpo").joinpath("planning/known_models.json").read_text("utf-8"))


def describe_known(model: str) -> str:
    """Return the advice for a known model whose files cannot be read."""
    if model not in load_known_models():
        return ""
    return f"; vlm-grpo plan {model} plans it without any, with assumed prompts"


class KnownPlanner(StepPlanner):
    """A planner of a known model, with prompts of one image that are assumed."""

    num_rows, images_per_prompt, min_pixels = 0, 1, 28 * 28

    def __init__(
        self,
        settings: Settings,
        gpu: str,
        devices: int = 1,
        weights: Weights = "replicated",
        reserved: float = 0.0,
    ) -> None:
        super().__init__(settings, replace(find_device(gpu), reserved=reserved), devices, weights)
        self.facts = load_known_models()[settings.model]
        if any(own.extra_model is not None for own in settings.used_methods):
            raise UserError(
                "objective.distillation needs the shape of the teacher: plan a recipe with "
                "model=FOLDER, a folder that has its config.json, tokenizer and processor"
            )

    def read_shape(self, policy: PolicySettings) -> ModelShape:
        kind = "full" if policy.master_weights == "float32" else "bfloat16"
        stored = PolicySettings()
        if policy.lora is not None:
            kind = "lora"
            same = {name: getattr(policy.lora, name) for name in ("r", "alpha", "use_rslora")}
            stored = PolicySettings(lora=LoraSettings(**same))
        for name in type(policy).model_fields:
            if name not in _COUNTED and getattr(policy, name) != getattr(stored, name):
                raise UserError(
                    f"policy.{name}={getattr(policy, name)} is not among the known shapes of "
                    f"{self.settings.model}: plan a recipe with model=FOLDER, a folder that has "
                    "its config.json, tokenizer and processor"
                )
        parts = {part: self.facts[part] for part in ("text", "vision")}
        values = self.facts["shapes"][kind]
        shape = TypeAdapter(ModelShape).validate_python(values | parts)
        if policy.lora is not None and shape.layer is not None:
            share = policy.lora.r / _RANK
            states = {name: int(size * share) for name, size in shape.state_bytes.items()}
            shape = replace(
                shape,
                num_trained=shape.num_trained * policy.lora.r // _RANK,
                lora_rank=policy.lora.r,
                layer=shape.layer.extrapolate(LayerBytes(**values["doubled"]), share - 1),
                state_bytes=states,
            )
        if policy.load_in != "none":
            matrices = shape.text.matrices(shape.text.intermediate_total)
            shape = shape.quantize(shape.text.layers * matrices, policy)
        return shape

    def count_prompts(self, policy: PolicySettings) -> list[PromptSize]:
        edge, merge = self.facts["patch_size"], self.facts["patches_per_token"]
        tokens = IMAGE_TOKENS
        if policy.max_pixels is not None:
            tokens = max(1, policy.max_pixels // (merge * edge**2))
        values = tokens * merge * self.facts["vision"]["patch_values"]
        return [PromptSize(tokens + TEXT_TOKENS, tokens, values, tokens * merge * edge**2)]


def build_known_settings(model: str, overrides: Overrides = ()) -> Settings:
    """Return settings for a known model that use little memory without changing the result."""
    content = {
        "name": "model",
        "task": "none",
        "model": model,
        "data": {"train": "none"},
        "policy": {"gradient_checkpointing": "full", "head_chunk_tokens": 256},
        "rollout": {"max_tokens_per_batch": 8192},
        "optim": {"prompts_per_step": 8, "max_tokens_per_batch": 4096},
    }
    return build_settings(f"of model {model}", OmegaConf.create(content), overrides)


def format_table(models: Sequence[str], overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield a Markdown table of the largest group of each model on each card, and the smallest
    card that holds a group of 8.
    """
    has_lora = any(text.startswith("policy.lora") for text in overrides)
    kinds = [row for row in TABLE_KINDS.items() if row[0] != "full" or not has_lora]
    cards = " | ".join(f"{card} GB" for card in TABLE_CARDS)
    yield f"| model | trained | {cards} | smallest card |"
    yield "| --- " * (len(TABLE_CARDS) + 3) + "|"
    for model in models:
        for kind, own in kinds:
            settings = build_known_settings(model, [*own, *overrides])
            planner = KnownPlanner(settings, f"{TABLE_CARDS[0]}GB")
            groups = [
                planner.on(find_device(f"{card}GB")).find_largest_group(TABLE_GENERATIONS)
                for card in TABLE_CARDS
            ]
            cells = " | ".join(
                "–" if not group else f"{group}{'+' * (group == TABLE_GENERATIONS)}"
                for group in groups
            )
            card = planner.find_smallest_card()
            smallest = f"{card} GB" if card else f"more than {CARDS[-1]} GB"
            yield f"| {model.rpartition('/')[2]} | {kind} | {cells} | {smallest} |"
