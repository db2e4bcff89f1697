"""OmniDocBench: pages of many kinds, with their text blocks, tables and formulas in reading order.

--source: OmniDocBench.json, or the folder that holds it.
--images: the folder with the pages' images.
"""

from __future__ import annotations

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import find_file, read_json
from vlm_grpo.data_scripts.rows import RawRecord

_LEFT_OUT = ("abandon", "figure", "header", "footer", "page_number", "page_footnote")
_ATTRIBUTES = ("data_source", "language", "layout", "subset")


@converter(tasks=("document",), splits={"test": None})
def convert(request: Request) -> Rows:
    """Yield one row per page; pages without text are left out."""
    for row in read_json(find_file(request.source, "OmniDocBench*.json")):
        page = row["page_info"]
        name, attributes = page["image_path"], page.get("page_attribute") or {}
        text = build_markdown(row["layout_dets"])
        if not text:
            yield RefusedRow(name, "the page has no text", kind="excluded")
            continue
        meta = {key: attributes[key] for key in _ATTRIBUTES if key in attributes}
        yield ConvertedRow(name, (name,), "Read this page.", {"text": text}, meta)


def build_markdown(blocks: list[RawRecord]) -> str:
    """Return the text of a page's blocks in reading order, separated by empty lines.

    Headers, footers, page numbers, footnotes, figures and blocks without an order are left out, as
    in the benchmark's end-to-end evaluation.
    """
    kept = [
        block
        for block in blocks
        if block.get("order") is not None
        and not block.get("ignore")
        and block["category_type"] not in _LEFT_OUT
    ]
    kept.sort(key=lambda block: block["order"])
    texts = (block.get("html") or block.get("latex") or block.get("text") or "" for block in kept)
    return "\n\n".join(text.strip() for text in texts if text.strip())


if __name__ == "__main__":
    raise SystemExit(convert.main())
