"""Images that show the same picture, after re-encoding or resizing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

_THUMBNAIL_SIZE = (16, 16)
"""Size in pixels of the thumbnails that decide whether two images are duplicates."""
_MEAN_DIFFERENCE, _MAX_DIFFERENCE = 3.0, 32
"""Largest differences between thumbnails of duplicates, of 255: JPEG compression and resizing stay
below them; a different object exceeds them."""
_BANDS = 4
"""Images that differ in fewer than this many of their 128 hash bits agree in at least one band."""
_MAX_PAIRWISE = 5000
"""Largest bucket that is compared pairwise; in larger ones only equal thumbnails are found."""
_SIDE = 64
"""Side in pixels of the squares to which the images of a suspected pair are resized."""
_MAX_CHANGED = 0.03
"""Largest share of these pixels that differs, by more than ``_MAX_DIFFERENCE``, in duplicates: JPEG
compression of a photograph changes none of them, that of an image of 84 pixels up to 2 %."""


@dataclass(frozen=True)
class ImageHash:
    """A perceptual hash of an image."""

    bands: tuple[bytes, ...]  # four parts of a difference hash of 128 bits
    thumbnail: np.ndarray  # (16, 16, 3) RGB values, uint8
    load: Callable[[], Image.Image]  # returns the image


def hash_image(image: Image.Image, load: Callable[[], Image.Image] | None = None) -> ImageHash:
    """Return the hash of a decoded image; re-encoding or resizing the image hardly changes it.

    Args:
        image: the image.
        load: returns the image, for a closer look at it; None: the image is kept.
    """
    gray = image.convert("L")
    # A bit is set where the brightness rises from a cell to the next one in its row or column.
    across = np.asarray(gray.resize((9, 8), Image.Resampling.BOX), np.int16)
    down = np.asarray(gray.resize((8, 9), Image.Resampling.BOX), np.int16)
    bits = np.concatenate(
        [(np.diff(across, axis=1) > 0).ravel(), (np.diff(down, axis=0) > 0).ravel()]
    )
    bands = tuple(np.packbits(band).tobytes() for band in np.split(bits, _BANDS))
    thumbnail = image.convert("RGB").resize(_THUMBNAIL_SIZE, Image.Resampling.BOX)
    return ImageHash(bands, np.asarray(thumbnail), load or (lambda: image))


def find_duplicates(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Return groups of two or more indices whose hashes are of the same picture, in order.

    Hashes with a band in common and similar thumbnails are candidates; their pixels decide.
    """
    buckets: dict[tuple, list[int]] = defaultdict(list)
    for index, image_hash in enumerate(hashes):
        for number, band in enumerate(image_hash.bands):
            buckets[number, band].append(index)
    edges: set[tuple[int, int]] = set()
    for indices in buckets.values():
        edges |= _find_similar_pairs(indices, hashes)
    if not edges:
        return []
    rows, columns = zip(*edges, strict=True)
    graph = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(hashes), len(hashes)))
    labels = connected_components(graph, directed=False)[1]
    groups: dict[int, list[int]] = defaultdict(list)
    for index in sorted({*rows, *columns}):
        groups[labels[index]].append(index)
    return [equal for group in groups.values() for equal in _split_by_pixels(group, hashes)]


def _split_by_pixels(indices: Sequence[int], hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Return groups of two or more of the indices whose images have equal pixels."""
    groups: list[tuple[np.ndarray, list[int]]] = []
    for index in indices:
        pixels = _resize(hashes[index])
        for first, members in groups:
            if _share_of_changed(first, pixels) <= _MAX_CHANGED:
                members.append(index)
                break
        else:
            groups.append((pixels, [index]))
    return [members for _, members in groups if len(members) > 1]


def _resize(image_hash: ImageHash) -> np.ndarray:
    """Return the RGB values of an image at the common size, int16."""
    image = image_hash.load().convert("RGB")
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR), np.int16)


def measure_difference(first: ImageHash, second: ImageHash) -> float:
    """Return the share of the pixels of two images that differ, both resized to a common size."""
    return _share_of_changed(_resize(first), _resize(second))


def _share_of_changed(first: np.ndarray, second: np.ndarray) -> float:
    """Return the share of pixels that differ between two images of the common size."""
    return float((np.abs(first - second).max(axis=2) > _MAX_DIFFERENCE).mean())


def _find_similar_pairs(
    indices: Sequence[int], hashes: Sequence[ImageHash]
) -> set[tuple[int, int]]:
    """Return the pairs of ``indices`` whose thumbnails are similar."""
    if len(indices) < 2:
        return set()
    if len(indices) > _MAX_PAIRWISE:
        first: dict[bytes, int] = {}
        keys = [hashes[index].thumbnail.tobytes() for index in indices]
        return {
            (first[k], i) for k, i in zip(keys, indices, strict=True) if first.setdefault(k, i) != i
        }
    thumbnails = np.stack([hashes[index].thumbnail for index in indices]).astype(np.int16)
    pairs: set[tuple[int, int]] = set()
    for i in range(len(indices) - 1):
        difference = np.abs(thumbnails[i + 1 :] - thumbnails[i]).reshape(len(indices) - i - 1, -1)
        near = (difference.mean(1) <= _MEAN_DIFFERENCE) & (difference.max(1) <= _MAX_DIFFERENCE)
        pairs |= {(indices[i], indices[i + 1 + j]) for j in np.flatnonzero(near).tolist()}
    return pairs
