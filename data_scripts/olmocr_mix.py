"""olmOCR-mix: pages of PDF files with the text that GPT-4o or GPT-4.1 read.

Needs the extra ``documents``, which renders the PDF files of one page each.

--source: the folder of allenai/olmOCR-mix-0225, with train-s2pdf.parquet, eval-s2pdf.parquet,
train-iabooks.parquet and eval-iabooks.parquet, or one of them; also a file of olmOCR-mix-1025. Its
archives must be unpacked into pdf_tarballs/extracted next to it.
--images: a folder to write the pages' images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.olmocr_bench import render_page
from vlm_grpo.data_scripts.readers import parse_json


@converter(tasks=("document",), splits={"eval": None, "train": None})
def convert(request: Request) -> Rows:
    """Yield one row per page; pages without text and pages that are not upright are left out."""
    folder = request.path if request.path.is_dir() else request.path.parent
    for row in request.read_table():
        name = row.get("id") or row["__index_level_0__"]
        page = parse_json(row["response"], request.path) if "response" in row else row
        text = (page["natural_text"] or "").strip()
        if not text or page["is_rotation_valid"] is False:
            reason = "it is not upright" if text else "it has no text"
            yield RefusedRow(name, reason, kind="excluded")
            continue
        image = render_page(folder / "pdf_tarballs" / "extracted" / f"{name}.pdf", 1)
        meta = {"language": page["primary_language"]}
        yield ConvertedRow(name, (image,), "Read this page.", {"text": text}, meta)
