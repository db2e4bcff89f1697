"""Groups of which a part is sampled behind images with noise (NoisyRollout, arXiv:2504.13055)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.config.methods import MAX_NOISE_STEPS, NoiseSettings
from vlm_grpo.errors import UserError
from vlm_grpo.training.methods import Method, Metrics, Run, Variant
from vlm_grpo.training.step_batch import KeptGroup
from vlm_grpo.types import Example


@dataclass(frozen=True)
class DiffusionNoise:
    """Noise on an image x of values 0 to 1: √ᾱ_t · x + √(1 − ᾱ_t) · ε with ε standard normal.

    ᾱ_t is the product of 1 − β_i for i = 0 … t; β_i = 10⁻⁵ + (0.005 − 10⁻⁵) · σ(12 i / 999 − 6)
    (visual contrastive decoding, arXiv:2311.16922; NoisyRollout, arXiv:2504.13055).
    """

    steps: int  # number of diffusion steps t, 1 to ``MAX_NOISE_STEPS``
    seed: tuple[int, ...]  # numbers, at least 0, that determine ε

    def __call__(self, image: Image.Image) -> Image.Image:
        values = np.asarray(image, dtype=np.float32) / 255
        noise = np.random.default_rng(self.seed).standard_normal(values.shape, np.float32)
        places = np.linspace(-6, 6, MAX_NOISE_STEPS + 1)[: self.steps + 1]
        kept = float(np.prod(1 - (1e-5 + (0.5e-2 - 1e-5) / (1 + np.exp(-places)))))
        values = values * kept**0.5 + noise * (1 - kept) ** 0.5
        return Image.fromarray(np.rint(values.clip(0, 1) * 255).astype(np.uint8))


@dataclass(frozen=True)
class NoisyImages(Variant):
    """Prompts with noise on their images; its seed has the index of the prompt besides."""

    noise: DiffusionNoise

    @property
    def label(self) -> tuple[str, int]:
        return "noise", self.noise.steps

    def change(self, example: Example, index: int) -> Example | None:
        if not example.images:
            return None
        seed = *self.noise.seed, index
        return example.with_changes(lambda number: replace(self.noise, seed=(*seed, number)))


class Noise(Method):
    """Noise on the images of a part of each group, which falls over the run."""

    name, block, has_videos = "noise", "rollout.noise", False
    own: NoiseSettings

    def start(self, run: Run) -> None:
        super().start(run)
        if not any(example.images for example in run.stream.examples):
            raise UserError(
                "rollout.noise has no effect: no training example has an image; remove it"
            )

    def variant(self, step: int) -> NoisyImages | None:
        settings = self.run.settings
        if settings.is_supervised(step):
            return None
        strength = self.anneal(settings.progress_at(step + 1))
        return NoisyImages(DiffusionNoise(strength, (settings.seed,))) if strength else None

    def anneal(self, progress: float) -> int:
        """Return the strength after a share of the run: ⌊α₀ · (1 − σ(λ · (progress − γ)))⌋."""
        gate = math.tanh(self.own.steepness * (progress - self.own.midpoint) / 2)  # 2 σ − 1
        return int(self.own.strength * (1 - gate) / 2)

    def count_variants(self, size: int) -> int:
        return min(max(1, math.floor(self.own.share * size + 0.5)), size - 1)

    def learn(self, step: int, observed: list[Any], recalled: Sequence[KeptGroup]) -> Metrics:
        variant = self.variant(step)
        return {"noise/strength": 0 if variant is None else variant.noise.steps}
