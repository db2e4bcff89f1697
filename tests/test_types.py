"""Decoding of image references, and the id of a group."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_files import encode_image
from PIL import Image

from vlm_grpo.types import Completion, Example, Group, ImageRef, Prompt, Score


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_an_image_is_decoded_from_its_file_or_bytes(tmp_path):
    data = encode_image(noise(6, 4))
    (tmp_path / "a.png").write_bytes(data)
    for path, content in ((tmp_path / "a.png", None), (None, data)):
        reference = ImageRef("a", (6, 4), (28, 28), path, content)
        assert reference.load().tobytes() == noise(6, 4).tobytes()
        assert reference.load() is not reference.load()  # pixels are not kept


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


def test_a_group_has_the_id_of_its_example():
    prompt = Prompt(Example("row-1", (), "?", 3), "?", (1, 2), {})
    completion = Completion((5, 6), (-0.1, -0.2), "3", "eos")
    assert Group(prompt, (completion,), (Score(3, {"exact": 1.0}, 1.0, {}),)).id == "row-1"
