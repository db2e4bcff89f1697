"""Passes through the vision tower: one for each image, whoever asks for it in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm_grpo.families import Family, ImageFeatures
from vlm_grpo.types import ImageRef, Prompt
from vlm_grpo.utils.timing import Stopwatch

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


class ImageEncoder:
    """The vision tower, asked once for each unique image.

    A frozen tower's features are kept until ``forget``; those of a trained one carry their
    gradient, and are made anew for every pass that is not inside ``share_passes``.

    Args:
        family: the model's family.
        model: the bare transformers model.
        is_trained: the tower is trained.
        stopwatch: times the phase ``vision``.
    """

    def __init__(self, family: Family, model: Any, is_trained: bool, stopwatch: Stopwatch) -> None:
        self.family, self.model, self.is_trained = family, model, is_trained
        self.stopwatch = stopwatch
        self._kept: dict[ImageRef, ImageFeatures] = {}
        self._cut: list[CutFeatures] | None = None

    def __call__(self, prompts: Sequence[Prompt]) -> tuple[dict[ImageRef, ImageFeatures], int]:
        """Features of the prompts' images, and how many went through the tower for them."""
        with_gradient = self.is_trained and torch.is_grad_enabled()
        known = {} if self.is_trained else self._kept
        if with_gradient:
            known = {image: it for cut in self._cut or () for image, it in cut.cut.items()}
        todo: dict[ImageRef, dict] = {}
        for prompt in prompts:
            if any(image not in known for image in prompt.example.images):
                tensors = self.family.split_images(prompt)
                pairs = zip(prompt.example.images, tensors, strict=True)
                todo |= {image: values for image, values in pairs if image not in known}
        with self.stopwatch("vision"), torch.set_grad_enabled(with_gradient):
            features = [
                image
                for part in encoder_passes(list(todo.values()))
                for image in self.family.encode_images(self.model, part)
            ]
        new = dict(zip(todo, features, strict=True))
        if with_gradient and self._cut is not None and new:
            self._cut.append(CutFeatures.of(new))
            new = self._cut[-1].cut
        known |= new
        return known, len(todo)

    def forget(self) -> None:
        """Drop the features that are kept."""
        self._kept.clear()

    @contextlib.contextmanager
    def share_passes(self) -> Iterator[Callable[[Container[ImageRef]], None]]:
        """Inside, micro-batches that share an image share its pass through a trained tower.

        Yields:
            What to call after each micro-batch's backward with the images that later ones need:
            the passes that gave none of them run backward then.
        """

        def finish(needed: Container[ImageRef]) -> None:
            waiting = self._cut or []
            self._cut = [cut for cut in waiting if any(image in needed for image in cut.cut)]
            for cut in waiting:
                if cut not in self._cut:
                    cut.backward()

        self._cut = []
        try:
            yield finish
        finally:
            self._cut = None
