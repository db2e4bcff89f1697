"""Examples that several evaluations are run on."""

from pathlib import Path

import pytest

from vlm_grpo.data_scripts import make_shapes


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """40 counting examples on disk."""
    words = ["--count", "40", "--seed", "5", "--out", str(tmp_path / "shapes")]
    assert make_shapes.draw_examples.main(words) == 0
    return tmp_path / "shapes" / "counting.jsonl"
