"""A cache of decoded images."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vlm_grpo.types import ImageRef


class ImageCache:
    """A thread-safe cache of recently used images, so that examples share a decoded image.

    Args:
        decode: decodes and resizes an image.
        size: number of images to keep.
    """

    def __init__(self, decode: Callable[[ImageRef], Any], size: int) -> None:
        self.decode, self.size = decode, size
        self._images: dict[ImageRef, Any] = {}  # the most recently used last
        self._lock = threading.Lock()

    def load(self, reference: ImageRef) -> tuple[Any, bool]:
        """Return the image, and whether it was decoded by this call.

        Raises:
            ValueError: the image cannot be read.
        """
        with self._lock:
            if reference in self._images:
                image = self._images[reference] = self._images.pop(reference)
                return image, False
        image = self.decode(reference)
        with self._lock:
            self._images[reference] = image
            if len(self._images) > self.size:
                del self._images[next(iter(self._images))]
        return image, True
