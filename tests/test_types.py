"""Decoding of image references."""

import pytest
from dataset_files import encode_image, photo, png

from vlm_grpo.types import ImageRef


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (None, (6, 4), "cannot be read: .*No such file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", (6, 4), "cannot be read: .*corrupt or of a format"),
        (encode_image(photo(0))[:3000], (160, 120), "cannot be read"),
        (encode_image(photo(0), "JPEG")[:1000], (160, 120), "cannot be read"),
        (png(6, 4), (3, 2), "has changed: it has 6x4 pixels instead of 3x2"),
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
