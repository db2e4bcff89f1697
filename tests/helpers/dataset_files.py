"""Small datasets on disk: images, JSON Lines and tables in published layouts, and bad rows."""

import io
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import write_jsonl
from PIL import Image

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example


def encode_image(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(width: int = 64, height: int = 48, shade: int = 200) -> bytes:
    return encode_image(Image.new("RGB", (width, height), (shade, 10, 10)))


def photo(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return a smooth random image, like a photograph at a coarse scale."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def png_with_claimed_size(width: int, height: int) -> bytes:
    """Return a small PNG whose header declares the given size."""
    data = bytearray(png(1, 1))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def write_files(root: Path, files: Mapping[str, Any]) -> Path:
    """Write files to a folder: bytes and text unchanged, lists as .jsonl, other values as JSON."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif path.suffix == ".jsonl":
            write_jsonl(path, *content)
        else:
            path.write_text(json.dumps(content))
    return root


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a Parquet file; images are {"bytes": …, "path": …}, as on the hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make_row(**changes: Any) -> dict[str, Any]:
    """Return a canonical counting row with changed fields; the value ``...`` removes a field."""
    row = {"id": "a", "images": ["a.png"], "question": "How many?", "answer": 3, **changes}
    return {name: value for name, value in row.items() if value is not ...}


def write_rows(folder: Path, *rows: dict[str, Any] | str | bytes) -> str:
    """Write rows, or raw lines, to ``rows.jsonl`` and return its path."""
    return str(write_jsonl(folder / "rows.jsonl", *rows))


def load(
    source: Any, task: str | Task = "counting", split: Any = "train", **settings: Any
) -> list[Example]:
    """Load a source, or rows, for a task or that of a name, with settings of data."""
    train = source if isinstance(source, str | Path) else "python"
    data = DataSettings.model_validate({"train": str(train), **settings})
    task = load_task(task) if isinstance(task, str) else task
    return [*load_examples(source, task, data, split)]


def get_load_error(source: Any, task: str = "counting", **settings: Any) -> str:
    """Load a source that must be refused and return the error message."""
    with pytest.raises(UserError) as error:
        load(source, task, "eval", **settings)
    return str(error.value)


def check_bad_row(folder: Path, bad: dict[str, Any] | str | bytes, reason: str) -> None:
    """Check that loading a good and a bad row names the bad one's file, line and reason."""
    source = write_rows(folder, make_row(id="good"), bad)
    message = get_load_error(source)
    assert f"{source}:2: " in message
    assert reason in message
    assert "1 bad row (good rows: 1)" in message
