"""Passes through the vision tower: how large they are, and how several micro-batches share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vlm_grpo.families import ImageFeatures
from vlm_grpo.types import ImageRef

ENCODER_PATCHES = 65_536
"""Patches that go through the vision tower at once: 12.8 million pixels of 14 × 14 patches."""


def encoder_passes(vision: Sequence[dict]) -> Iterator[list[dict]]:
    """The images in parts of at most ``ENCODER_PATCHES`` patches, or one image each."""
    part: list[dict] = []
    patches = 0
    for image in vision:
        count = len(image["pixel_values"])
        if part and patches + count > ENCODER_PATCHES:
            yield part
            part, patches = [], 0
        part.append(image)
        patches += count
    if part:
        yield part


@dataclass(frozen=True, eq=False)
class CutFeatures:
    """Features that one pass through a trained vision tower gave, cut off from its graph.

    Several micro-batches gather their gradients at the cut; the pass itself runs backward once.

    Attributes:
        whole: by image, as the vision tower gave them.
        cut: the same values as leaves, which the language model is fed with.
    """

    whole: dict[ImageRef, ImageFeatures]
    cut: dict[ImageRef, ImageFeatures]

    @staticmethod
    def of(whole: dict[ImageRef, ImageFeatures]) -> CutFeatures:
        return CutFeatures(whole, {image: _leaf(features) for image, features in whole.items()})

    def backward(self) -> None:
        """Pass the gradient gathered at the cut on into the vision tower."""
        outputs, grads = [], []
        for image, features in self.whole.items():
            for tensor, leaf in zip(_tensors(features), _tensors(self.cut[image]), strict=True):
                if leaf.grad is not None:
                    outputs.append(tensor)
                    grads.append(leaf.grad)
        if outputs:
            torch.autograd.backward(outputs, grads)


def _tensors(features: ImageFeatures) -> tuple[torch.Tensor, ...]:
    return features.embeds, *features.deepstack


def _leaf(features: ImageFeatures) -> ImageFeatures:
    embeds, *deepstack = (tensor.detach().requires_grad_() for tensor in _tensors(features))
    return ImageFeatures(embeds, tuple(deepstack))
