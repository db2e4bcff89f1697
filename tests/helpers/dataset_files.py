"""Small datasets on disk: images, JSON files and tables in the layouts that authors publish."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(width: int = 64, height: int = 48, shade: int = 200) -> bytes:
    """An encoded image of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 10, 10)).save(buffer, format="PNG")
    return buffer.getvalue()


def put(root: Path, files: Mapping[str, Any]) -> Path:
    """Write files below a folder: bytes and text as they are, lists for .jsonl, other as JSON."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            path.write_text(json.dumps(content))
    return root


def put_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A parquet file; an image column is {"bytes": …, "path": …}, as the hub has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header announces this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
