"""Decoding of image references, and the id of a group."""

import numpy as np
import pytest
from dataset_files import encode_image
from PIL import Image

from vlm_grpo.types import ImageRef


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (None, (6, 4), "cannot be read: .*No such file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", (6, 4), "cannot be read: .*corrupt or of a format"),
        (encode_image(noise(64, 64))[:3000], (64, 64), "cannot be read"),
        (encode_image(noise(64, 64), "JPEG")[:1000], (64, 64), "cannot be read"),
        (encode_image(noise(6, 4)), (3, 2), "has changed: it has 6x4 pixels instead of 3x2"),
    ],
)
def test_a_file_that_has_changed_is_named(content, size, message, tmp_path):
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"image a\.png {message}"):
        ImageRef("a.png", size, size, path).load()
    with pytest.raises(ValueError, match="image row 3 cannot be read"):
        ImageRef("row 3", (9, 9), (9, 9)).load()
