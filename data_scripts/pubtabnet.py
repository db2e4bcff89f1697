"""PubTabNet: images of tables from scientific articles, with their HTML.

--source: PubTabNet_2.0.0.jsonl, or the folder that holds it. FinTabNet's files have the same form,
but name pages of PDF files instead of images.
--images: the folder that holds train, val and test.
"""

from __future__ import annotations

import re

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import find_file, read_json_rows
from vlm_grpo.data_scripts.rows import RawRecord


@converter(tasks=("table",), splits={"val": 9_115, "train": 500_777, "test": None})
def convert(request: Request) -> Rows:
    """Yield one row per table of the split; meta.type is complex if a cell has a span."""
    for row in read_json_rows(find_file(request.source, "PubTabNet*.jsonl", "*.jsonl")):
        if row["split"] != request.split:
            continue
        name, table = row["filename"], build_html(row["html"])
        if table is None:
            yield RefusedRow(name, "its tags and its cells have different numbers")
            continue
        kind = "complex" if re.search(r"(?:col|row)span=", table) else "simple"
        image = f"{request.split}/{name}"
        yield ConvertedRow(name, (image,), "Write the table in this image.", table, {"type": kind})


def build_html(annotation: RawRecord) -> str | None:
    """Return the HTML of a table, its cells between the tags of its structure; None if their
    numbers differ."""
    tags = "".join(annotation["structure"]["tokens"]).split("</td>")
    cells = ["".join(map(_escape, cell["tokens"])) for cell in annotation["cells"]]
    if len(tags) != len(cells) + 1:
        return None
    parts = (f"{tag}{cell}</td>" for tag, cell in zip(tags[:-1], cells, strict=True))
    return f"<table>{''.join(parts)}{tags[-1]}</table>"


def _escape(token: str) -> str:
    """Escape a character of a text; longer tokens are tags."""
    return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(token, token)


if __name__ == "__main__":
    raise SystemExit(convert.main())
