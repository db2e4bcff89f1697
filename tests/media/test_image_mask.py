"""Black patches on images."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.media.image_mask import PatchMask


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_whole_patches_are_black_or_unchanged(mode: str) -> None:
    values = np.random.default_rng(0).integers(1, 256, (31, 45), dtype=np.uint8)
    image = Image.fromarray(values).convert(mode)
    found, before = np.asarray(PatchMask(0.5, 10, (3, 1))(image)), np.asarray(image)
    assert found.shape == before.shape
    kinds = []
    for top in range(0, 31, 10):
        for left in range(0, 45, 10):
            patch = found[top : top + 10, left : left + 10]
            own = before[top : top + 10, left : left + 10]
            assert (patch == 0).all() or (patch == own).all()
            kinds.append(bool((patch == 0).all()))
    assert 0 < sum(kinds) < len(kinds) == 20


def test_the_seed_sets_the_patches_and_the_ratio_their_share() -> None:
    image = Image.new("RGB", (500, 500), "white")
    one, same, other = (PatchMask(0.6, 5, seed)(image) for seed in ((1, 2), (1, 2), (1, 3)))
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert np.mean(np.asarray(one) == 0) == pytest.approx(0.6, abs=0.02)
    assert not np.asarray(PatchMask(1.0, 14, (0,))(image)).any()
