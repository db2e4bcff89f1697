"""PubTabNet: images of tables from scientific articles, with their HTML.

--source: PubTabNet_2.0.0.jsonl, or the folder that holds it.
--images: the folder that holds train, val and test.
"""

import re
from collections.abc import Sequence

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    Image,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import read_json_rows


def build_row(
    name: str, image: Image, structure: Sequence[str], cells: Sequence[RawRecord]
) -> ConvertedRow | RefusedRow:
    """Build the row of a table from the tags of its structure and the tokens of its cells."""
    tags = "".join(structure).split("</td>")
    texts = ["".join(map(_escape, cell["tokens"])) for cell in cells]
    if len(tags) != len(texts) + 1:
        return RefusedRow(name, "its tags and its cells have different numbers")
    parts = (f"{tag}{text}</td>" for tag, text in zip(tags[:-1], texts, strict=True))
    table = f"<table>{''.join(parts)}{tags[-1]}</table>"
    kind = "complex" if re.search(r"(?:col|row)span=", table) else "simple"
    return ConvertedRow(name, (image,), "Write the table in this image.", table, {"type": kind})


def _escape(token: str) -> str:
    """Escape a character of a text; longer tokens are tags."""
    return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(token, token)


@converter(tasks=("table",), splits={"val": 9_115, "train": 500_777, "test": None})
def convert(request: Request) -> Rows:
    """Yield one row per table of the split; meta.type is complex if a cell has a span."""
    for row in read_json_rows(request.find_file("PubTabNet*.jsonl", "*.jsonl")):
        if row["split"] != request.split:
            continue
        tokens, cells = row["html"]["structure"]["tokens"], row["html"]["cells"]
        name = row["filename"]
        yield build_row(name, f"{request.split}/{name}", tokens, cells)
