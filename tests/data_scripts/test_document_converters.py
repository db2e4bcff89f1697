"""The converters of documents and tables on small files in the published layouts."""

from __future__ import annotations

import io
import json

import pytest
from dataset_files import encode_image, png, write_files, write_table
from PIL import Image

from vlm_grpo.data_scripts.olmocr_bench import LONGEST_SIDE
from vlm_grpo.data_scripts.omnidocbench import build_markdown


def make_pubtabnet_row(name: str, split: str, cells: list[list[str]]) -> dict:
    tags = ["<thead>", "<tr>", "<td", ' colspan="2"', ">", "</td>", "</tr>", "</thead>", "<tbody>"]
    tags += ["<tr>", "<td>", "</td>", "<td>", "</td>", "</tr>", "</tbody>"]
    html = {"structure": {"tokens": tags}, "cells": [{"tokens": tokens} for tokens in cells]}
    return {"filename": name, "split": split, "imgid": 1, "html": html}


def test_pubtabnet_puts_the_cells_into_the_structure(convert, tmp_path):
    cells = [["<b>", "p", "</b>"], ["<", "5"], []]
    rows = [make_pubtabnet_row("a.png", "val", cells), make_pubtabnet_row("b.png", "train", cells)]
    rows.append(make_pubtabnet_row("c.png", "val", cells[:2]))
    files = {"PubTabNet_2.0.0.jsonl": rows, "images/val/a.png": png(), "images/val/c.png": png()}
    write_files(tmp_path, files)
    result = convert("pubtabnet", tmp_path, tmp_path / "images", split="val")
    assert result.answers == {
        "a.png": '<table><thead><tr><td colspan="2"><b>p</b></td></tr></thead>'
        "<tbody><tr><td>&lt;5</td><td></td></tr></tbody></table>"
    }
    assert result.rows[0]["images"] == ["val/a.png"]
    assert result.rows[0]["meta"] == {"type": "complex"}
    assert result.reasons == {"its tags and its cells have different numbers": 1}


def test_fintabnet_reads_the_tables_of_docling(convert, tmp_path):
    cells = [[{"tokens": ["<b>", "p", "</b>"], "bbox": [0, 0, 4, 4]}], [{"tokens": ["5"]}]]
    row = {
        "image": {"bytes": png(), "path": None},
        "html": ["<tr>", "<td>", "</td>", "<td", ' rowspan="2"', ">", "</td>", "</tr>"],
        "cells": cells,
        "otsl": ["fcel", "fcel", "nl"],
    }
    write_table(tmp_path / "data/test-00000-of-00001-7d6f.parquet", [row, row | {"cells": []}])
    result = convert("fintabnet", tmp_path, tmp_path / "images")
    assert result.answers == {
        "test-0": '<table><tr><td><b>p</b></td><td rowspan="2">5</td></tr></table>'
    }
    assert result.rows[0]["meta"] == {"type": "complex"}
    assert result.reasons == {"its tags and its cells have different numbers": 1}


PAGE = {"primary_language": "en", "is_rotation_valid": True, "natural_text": "# Title\n\nText."}


@pytest.mark.parametrize("is_json", [True, False])  # olmOCR-mix-0225, olmOCR-mix-1025
def test_olmocr_mix_renders_pages_with_text(convert, tmp_path, is_json):
    changes = [{}, {"natural_text": None}, {"is_rotation_valid": False}, {}]
    pages = [PAGE | change for change in changes]
    rows = [{"response": json.dumps(page)} if is_json else page for page in pages]
    keys = ["id", "__index_level_0__"]
    rows = [row | {keys[is_json]: f"page{n}", "url": "x"} for n, row in enumerate(rows)]
    pdf = encode_image(Image.new("RGB", (200, 100), "white"), "PDF")
    write_files(tmp_path, {"pdf_tarballs/extracted/page0.pdf": pdf})
    write_table(tmp_path / "eval-s2pdf.parquet", rows)
    for source in (tmp_path, tmp_path / "eval-s2pdf.parquet"):
        (tmp_path / "out" / "olmocr_mix.jsonl").unlink(missing_ok=True)
        result = convert("olmocr_mix", source, tmp_path / "images")
        assert result.answers == {"page0": {"text": "# Title\n\nText."}}
        assert result.rows[0]["meta"] == {"language": "en"}
        assert result.reasons == {
            "it has no text": 1,
            "it is not upright": 1,
            "its image is missing in the source": 1,  # page3.pdf
        }


def test_olmocr_bench_groups_tests_by_page(convert, tmp_path):
    test = {"pdf": "x/a.pdf", "page": 1, "id": "1", "checked": "verified", "url": None}
    texts = [
        test | {"type": "present", "text": "EXIT", "max_diffs": 1},
        test | {"type": "format", "text": "EXIT", "format": "bold"},
    ]
    blank = test | {"pdf": "y/b.pdf", "page": 2, "type": "baseline", "max_length": 10}
    other = test | {"page": 2, "type": "format", "text": "EXIT", "format": "bold"}
    pages = [Image.new("RGB", (200, 100), "white")] * 2
    pdf = encode_image(pages[0], "PDF", save_all=True, append_images=pages[1:])
    files = {"old_scans.jsonl": [*texts, other], "blanks.jsonl": [blank, blank | {"page": 3}]}
    write_files(tmp_path, {**files, "pdfs/x/a.pdf": pdf, "pdfs/y/b.pdf": pdf})
    result = convert("olmocr_bench", tmp_path, tmp_path / "images")
    assert result.answers["x/a.pdf-1"]["tests"] == [
        {"id": "1", "type": "present", "text": "EXIT", "max_diffs": 1, "category": "old_scans"},
        {"type": "baseline", "category": "baseline"},
    ]
    baseline = {"id": "1", "type": "baseline", "max_length": 10, "category": "blanks"}
    assert result.answers["y/b.pdf-2"]["tests"] == [baseline]
    assert result.answers.keys() == {"x/a.pdf-1", "y/b.pdf-2"}  # page 1 of b.pdf needs no baseline
    assert result.reasons == {
        "its image is missing in the source": 1,  # there is no page 3
        "it has no test of the benchmark's types": 1,
    }
    image = Image.open(io.BytesIO((tmp_path / "images" / result.rows[0]["images"][0]).read_bytes()))
    assert max(image.size) == LONGEST_SIDE


def make_block(number: int, category: str, **values: object) -> dict:
    return {"category_type": category, "order": number, "anno_id": number, "ignore": False} | values


def test_omnidocbench_joins_the_blocks_in_reading_order(convert, tmp_path):
    table = "<table><tr><td>1</td></tr></table>"
    blocks = [
        make_block(3, "table", html=table, latex="x"),
        make_block(1, "title", text="## Title"),
        make_block(2, "equation_isolated", latex="$$x$$", text=""),
        make_block(7, "header", order=None, text="Journal"),
        make_block(8, "page_footnote", text="Note"),
        make_block(4, "text_block", text="\\t a /t1 and/to", ignore=True),  # the script takes it
        make_block(9, "text_mask", text="masked"),
        make_block(5, "figure", order=None),
        make_block(6, "figure_caption", text="Figure 1"),
    ]
    page = {"image_path": "a.png", "page_attribute": {"language": "english", "special": []}}
    extra = {
        "relation": [{"source_anno_id": 5, "target_anno_id": 6, "relation_type": "parent_son"}]
    }
    rows = [
        {"page_info": page, "layout_dets": blocks, "extra": extra},
        {"page_info": {"image_path": "b.png"}, "layout_dets": blocks[3:4], "extra": extra},
    ]
    write_files(tmp_path, {"images/a.png": png(), "OmniDocBench.json": rows})
    result = convert("omnidocbench", tmp_path, tmp_path / "images")
    texts = ["# Title", "$$x$$", table, "a \t1 and/to", "Figure 1"]
    assert result.answers == {"a.png": {"text": "\n\n".join(texts)}}
    assert result.rows[0]["meta"] == {"language": "english"}
    assert result.reasons == {"the page has no text": 1}


@pytest.mark.parametrize(
    ("texts", "pairs", "expected"),
    [
        (["New", "x", "Mexico"], [(0, 2)], ["New Mexico", "x"]),
        (["trun-", "cated"], [(1, 0)], ["trun-cated"]),  # whichever end is the source
        (["陕", "西省"], [(0, 1)], ["陕西省"]),
        (["GPU", "上"], [(0, 1)], ["GPU上"]),
        (["a", "b", "c"], [(0, 1), (1, 2)], ["a b c"]),  # the script repeats the second of three
        (["a", "b", "c", "d"], [(0, 1), (2, 3), (1, 2)], ["a b c d"]),
        (["a", "", "c"], [(0, 1), (1, 2)], ["a c"]),
        (["a"], [(0, 7)], ["a"]),  # the other is no text
    ],
)
def test_omnidocbench_joins_a_cut_paragraph(texts, pairs, expected):
    blocks = [make_block(n, "text_block", text=text) for n, text in enumerate(texts)]
    relations = [
        {"source_anno_id": a, "target_anno_id": b, "relation_type": "truncated"} for a, b in pairs
    ]
    page = {"layout_dets": blocks[::-1], "extra": {"relation": relations}}
    assert build_markdown(page) == "\n\n".join(expected)
