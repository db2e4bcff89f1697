"""Image encoding: each unique image passes through the vision tower once per step."""

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from vlm_grpo.model.engine.packing import ENCODER_PATCHES
from vlm_grpo.model.engine.repeated import Counters
from vlm_grpo.model.families.family import Family, ImageFeatures, Unit
from vlm_grpo.types import ImageRef, Prompt
from vlm_grpo.utils.stopwatch import Stopwatch


class ImageEncoder:
    """A vision tower that encodes each unique image once.

    Features of a frozen tower are cached until ``cache`` is cleared. Features of a trained tower
    carry a gradient and are recomputed in every call, except inside ``share_passes``. Changed
    images have passes of their own, so that others are rounded as without them, and are not cached.
    The stopwatch times the phase ``vision``.
    """

    def __init__(self, family: Family, model: Any, is_trained: bool, stopwatch: Stopwatch) -> None:
        self.family, self.model, self.is_trained = family, model, is_trained
        self.stopwatch = stopwatch
        self.cache: dict[Unit, ImageFeatures] = {}
        self._passes: list[DetachedFeatures] | None = None
        self._watched: dict[Unit, ImageFeatures] | None = None

    def __call__(self, prompts: Sequence[Prompt], counters: Counters) -> dict[Unit, ImageFeatures]:
        with_gradient = self.is_trained and torch.is_grad_enabled()
        known = {} if self.is_trained else self.cache
        if with_gradient:
            for encoder_pass in self._passes or ():
                known |= encoder_pass.leaves
        todo: dict[Unit, dict] = {}
        units = list[Unit]()
        for part in (part for prompt in prompts for part in prompt.parts or (prompt,)):
            own = self.family.units(part.example.images)
            units += own
            if any(unit not in known for unit in own):
                pairs = zip(own, self.family.split_images(part), strict=True)
                todo |= {unit: values for unit, values in pairs if unit not in known}
        with self.stopwatch("vision"), torch.set_grad_enabled(with_gradient):
            changed = self._encode({u: values for u, values in todo.items() if u[0].change})
            new = self._encode({u: values for u, values in todo.items() if u not in changed})
        if with_gradient and self._passes is not None and new:
            self._passes.append(DetachedFeatures(new))
            new = self._passes[-1].leaves
        counters.encoder_passes += sum(map(len, todo))
        known |= new
        found = {**known, **changed} if changed else known
        if self._watched is None or not torch.is_grad_enabled():
            return found
        for unit in units:
            if unit not in self._watched:
                leaf = found[unit] if self.is_trained else _detach(found[unit], watched=True)
                self._watched[unit] = leaf
        return {**found, **self._watched}

    def _encode(self, vision: dict[Unit, dict]) -> dict[Unit, ImageFeatures]:
        features = [
            image
            for images in split_passes(list(vision.values()))
            for image in self.family.encode_images(self.model, images)
        ]
        return dict(zip(vision, features, strict=True))

    @contextlib.contextmanager
    def share_passes(
        self, watched: dict[Unit, ImageFeatures] | None = None
    ) -> Iterator[Callable[[Container[ImageRef]], None]]:
        """Share passes through a trained tower between the micro-batches run inside.

        Yields a function to call after each micro-batch's backward with the images that later
        micro-batches need; it runs the backward of the passes that encoded none of them.

        ``watched`` gets the features of the images of these micro-batches, whose ``grad`` is then
        that of the loss, also those of a frozen tower; None: only a trained tower needs it.
        """

        def finish(needed: Container[ImageRef]) -> None:
            passes, self._passes = self._passes or [], []
            for encoder_pass in passes:
                if any(image in needed for unit in encoder_pass.leaves for image in unit):
                    self._passes.append(encoder_pass)
                else:
                    encoder_pass.backward()

        self._passes, self._watched = [], watched
        try:
            yield finish
        finally:
            self._passes = self._watched = None


def split_passes(vision: Sequence[dict]) -> list[list[dict]]:
    """Split images into passes of at most ``ENCODER_PATCHES`` patches, or of one larger image."""
    parts: list[list[dict]] = []
    room = 0
    for image in vision:
        count = len(image["pixel_values"])
        if not parts or count > room:
            parts.append([])
            room = ENCODER_PATCHES
        parts[-1].append(image)
        room -= count
    return parts


class DetachedFeatures:
    """Features from one pass through a trained vision tower, detached from its graph.

    Several micro-batches accumulate their gradients in the ``leaves``; the pass runs backward once.
    """

    def __init__(self, encoded: dict[Unit, ImageFeatures]) -> None:
        self.encoded = encoded
        self.leaves = {unit: _detach(features) for unit, features in encoded.items()}

    def backward(self) -> None:
        """Propagate the gradients accumulated in the leaves through the vision tower."""
        sides = (tree_leaves([*features.values()]) for features in (self.encoded, self.leaves))
        tensors, leaves = ([x for x in side if isinstance(x, torch.Tensor)] for side in sides)
        pairs = [(t, leaf.grad) for t, leaf in zip(tensors, leaves, strict=True)]
        pairs = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        if pairs:
            tensors, grads = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, grads)


def _detach(features: ImageFeatures, watched: bool = False) -> ImageFeatures:
    # Beside a trained projector or tower the other one can be frozen, and with it some outputs.
    def detach(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad or watched)

    return tree_map_only(torch.Tensor, detach, features)
