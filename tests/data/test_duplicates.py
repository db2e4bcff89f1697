"""Images that show the same picture: re-encoded and resized copies, and nothing else."""

from __future__ import annotations

import io

import numpy as np
from dataset_files import encode_image, photo
from PIL import Image

from vlm_grpo.data.duplicates import find_duplicates, hash_image, measure_difference
from vlm_grpo.data_scripts import make_shapes


def test_reencoded_and_resized_images_are_duplicates():
    first = photo(0)
    jpeg = Image.open(io.BytesIO(encode_image(first, "JPEG", quality=70)))
    smaller = first.resize((80, 60), Image.Resampling.LANCZOS)
    pictures = [first, photo(1), jpeg, photo(2), smaller]
    assert find_duplicates([hash_image(picture) for picture in pictures]) == [[0, 2, 4]]


def test_different_photographs_and_scenes_are_not_duplicates():
    scenes = [row.images[0].load() for row in make_shapes.draw_examples("counting", 300, seed=5)]
    hashes = [hash_image(picture) for picture in [*map(photo, range(300)), *scenes]]
    assert find_duplicates(hashes) == []


def test_images_that_differ_in_one_small_object_are_not_duplicates():
    scene = Image.new("RGB", (84, 84), "white")
    red, blue = scene.copy(), scene.copy()
    red.paste("red", (30, 30, 44, 44))
    blue.paste("blue", (30, 30, 44, 44))
    assert find_duplicates([hash_image(picture) for picture in (scene, red, blue)]) == []


def texture(seed: int) -> Image.Image:
    """Return a photograph under one of two patterns of small tiles with the same mean."""
    tiles = np.indices((120, 160)).sum(0) // 5 % 2 * 160 - 80  # 80 above or below the mean
    pixels = np.asarray(photo(0), np.int16) // 4 + 96
    return Image.fromarray((pixels + (tiles * (-1) ** seed)[..., None]).astype(np.uint8))


def test_images_with_equal_thumbnails_and_different_pixels_are_not_duplicates():
    first, second, copy = hash_image(texture(0)), hash_image(texture(1)), hash_image(texture(0))
    difference = first.thumbnail.astype(int) - second.thumbnail
    assert np.abs(difference).mean() < 3.0  # the hash alone calls them duplicates
    assert set(first.bands) & set(second.bands)
    assert find_duplicates([first, second, copy]) == [[0, 2]]
    assert measure_difference(first, second) > 0.5
    assert measure_difference(first, copy) == 0.0
