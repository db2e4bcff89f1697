from pathlib import Path

import pytest
from dataset_files import png, write_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one image, next to an image that its rows must not reach."""
    image = png(8, 6)
    return write_files(tmp_path, {"inside/a.png": image, "outside.png": image}) / "inside"
