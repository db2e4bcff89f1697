from pathlib import Path

import pytest
from dataset_files import png


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one image, next to an image that its rows must not reach."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.png").write_bytes(png(8, 6))
    (tmp_path / "outside.png").write_bytes(png(8, 6))
    return inside
