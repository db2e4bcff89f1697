"""Plans of well-known models without their files: the package has their configurations, and the
shapes that the table of cards needs."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter
from transformers import AutoConfig

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import Overrides, build_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.objects import Objects
from vlm_grpo.model.hub import load_known_models
from vlm_grpo.planning.devices import CARDS, find_device
from vlm_grpo.planning.planner import Planner, get_shape_key
from vlm_grpo.planning.sizes import ModelShape, PromptSize

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


class KnownPlanner(Planner):
    """A planner of a known model on a GPU, with prompts of one image that are assumed."""

    def read(self, objects: Objects) -> None:
        self.facts = load_known_models()[self.settings.model]
        self.config: Any = AutoConfig.for_model(**self.facts["config"])
        self.num_rows, self.images_per_prompt = 0, 1
        vision = self.config.vision_config
        edge = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        self.patches_per_token = getattr(vision, "spatial_merge_size", 2) ** 2
        self.min_pixels = edge**2 * self.patches_per_token  # of a token

    def read_shape(self, policy: PolicySettings) -> ModelShape:
        for kind, shape in self.facts["shapes"].items():
            stored = build_known_settings(self.settings.model, TABLE_KINDS[kind]).policy
            if get_shape_key(policy) == get_shape_key(stored):
                return TypeAdapter(ModelShape).validate_python(shape)
        return super().read_shape(policy)

    def count_prompts(self, policy: PolicySettings) -> list[PromptSize]:
        side = self.min_pixels or 1
        tokens = IMAGE_TOKENS if policy.max_pixels is None else max(1, policy.max_pixels // side)
        patch_values = self.facts["shapes"]["full"]["vision"]["patch_values"]
        values = tokens * self.patches_per_token * patch_values
        return [PromptSize(tokens + TEXT_TOKENS, tokens, values, tokens * side)]


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
    card that holds a group of 8."""
    has_lora = any(text.startswith("policy.lora") for text in overrides)
    kinds = [row for row in TABLE_KINDS.items() if row[0] != "full" or not has_lora]
    cards = " | ".join(f"{card} GB" for card in TABLE_CARDS)
    yield f"| model | trained | {cards} | smallest card |"
    yield "| --- " * (len(TABLE_CARDS) + 3) + "|"
    for model, (kind, own) in product(models, kinds):
        settings = build_known_settings(model, [*own, *overrides])
        planner, groups = KnownPlanner(settings, find_device("12GB")), []
        for card in TABLE_CARDS:
            group = planner.on(find_device(f"{card}GB")).find_largest_group(TABLE_GENERATIONS)
            groups.append(f"{group or '–'}{'+' * (group == TABLE_GENERATIONS)}")
        card = planner.find_smallest_card()
        smallest = f"{card} GB" if card else f"more than {CARDS[-1]} GB"
        cells = " | ".join([model.rpartition("/")[2], kind, *groups, smallest])
        yield f"| {cells} |"
