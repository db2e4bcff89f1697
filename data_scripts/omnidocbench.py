"""OmniDocBench: pages of many kinds, with their text blocks, tables and formulas in reading order.

--source: OmniDocBench.json, or the folder that holds it.
--images: the folder with the pages' images.
"""

import re
from typing import Any

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import read_json

_KEPT = {
    *("text_block", "title", "table", "equation_isolated", "equation_caption", "reference"),
    *("figure_caption", "figure_footnote", "table_caption", "table_footnote"),
    *("code_txt", "code_txt_caption", "code_algorithm", "code_algorithm_caption"),
}
"""Categories that the end-to-end evaluation matches, without headers and footers of all kinds."""
# The annotation writes some tabs as \t or /t, which the script removes.
_TAB = re.compile(r"[\\/]t(?![A-Za-z])")
_ATTRIBUTES = ("data_source", "language", "layout", "subset")


def build_markdown(page: RawRecord) -> str:
    """Return the text of a page's blocks in reading order, separated by empty lines.

    The blocks are those of the benchmark's end-to-end evaluation (end2end_dataset.py). It joins the
    blocks of a paragraph that a column or a figure cuts, at the place of the first. Titles are
    marked as in its own markdown (json2md.py).
    """
    kept = [block for block in page["layout_dets"] if block["category_type"] in _KEPT]
    kept.sort(key=lambda block: block.get("order") or 0)
    parts = _find_parts(page["extra"]["relation"])
    texts: dict[Any, str] = {}
    for block in kept:
        text = block.get("html") or block.get("latex") or block.get("text") or ""
        text = _TAB.sub("\t", text).strip()
        if block["category_type"] == "title":
            text = "# " + text.lstrip("# ")
        name = parts.get(block["anno_id"], block["anno_id"])
        if text and (before := texts.get(name)):
            # Words are separated; Chinese characters and halves of a hyphenated word are not.
            separate = (before[-1] + text[0]).isascii() and before[-1] != "-"
            text = before + " " * separate + text
        if text:
            texts[name] = text
    return "\n\n".join(texts.values())


def _find_parts(relations: list[RawRecord]) -> dict[int, int]:
    """Map the ids of a cut paragraph's blocks to one of them."""
    groups: dict[int, list[int]] = {}
    for relation in relations:
        if relation["relation_type"] == "truncated":
            ends = relation["source_anno_id"], relation["target_anno_id"]
            merged = [name for end in ends for name in groups.get(end, [end])]
            groups |= dict.fromkeys(merged, merged)
    return {name: group[0] for name, group in groups.items()}


@converter(tasks=("document",), splits={"test": None})
def convert(request: Request) -> Rows:
    """Yield one row per page; pages without text are left out."""
    for row in read_json(request.find_file("OmniDocBench*.json")):
        page = row["page_info"]
        name, attributes = page["image_path"], page.get("page_attribute") or {}
        text = build_markdown(row)
        if not text:
            yield RefusedRow(name, "the page has no text", kind="excluded")
            continue
        meta = {key: attributes[key] for key in _ATTRIBUTES if key in attributes}
        yield ConvertedRow(name, (name,), "Read this page.", {"text": text}, meta)
