"""The cache of decoded images: it decodes once, keeps the recent ones and forgets the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vlm_grpo.model.image_cache import ImageCache
from vlm_grpo.types import ImageRef


def reference(name: str) -> ImageRef:
    return ImageRef(name=name, size=(1, 1), resized_size=(1, 1), data=name.encode())


def load_all(cache: ImageCache, names: Sequence[str]) -> list[bool]:
    """Load images by name; return for each whether it was decoded."""
    loaded = [cache.load(reference(name)) for name in names]
    assert [image for image, _ in loaded] == [name.upper() for name in names]
    return [is_new for _, is_new in loaded]


def test_an_image_is_decoded_once() -> None:
    cache = ImageCache(lambda image: image.name.upper(), size=2)
    assert load_all(cache, "abab") == [True, True, False, False]


def test_the_least_recently_used_image_is_dropped() -> None:
    cache = ImageCache(lambda image: image.name.upper(), size=2)
    assert load_all(cache, "abac") == [True, True, False, True]  # c replaces b
    assert load_all(cache, "ab") == [False, True]


def test_a_hit_takes_the_lock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            taken.append("lock")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("vlm_grpo.model.image_cache.threading.Lock", Lock)
    cache = ImageCache(lambda image: image.name.upper(), size=2)
    load_all(cache, "a")
    taken.clear()

    # Between two locks, the image would be missing for other threads, which would decode it again.
    assert load_all(cache, "a") == [False]
    assert taken == ["lock"]


def test_an_unreadable_image_is_not_kept() -> None:
    def fail(image: ImageRef) -> str:
        raise ValueError(f"{image.name} is broken")

    cache = ImageCache(fail, size=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="a is broken"):
            cache.load(reference("a"))
