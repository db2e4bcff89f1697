"""olmOCR-Bench: unit tests of pages' texts; also the synthetic tests that olmOCR 2 was trained on.

The first page of each PDF file without a test of type baseline gets one, as in the benchmark's
script. Needs the extra ``documents``, which renders the PDF files.

--source: bench_data, the folder that holds the .jsonl files of tests and the folder pdfs.
--images: a folder to write the pages' images into.
"""

import io
from pathlib import Path
from typing import Any

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json_rows
from vlm_grpo.errors import UserError
from vlm_grpo.tasks.graders.page_tests import TYPES
from vlm_grpo.tasks.graders.tables import import_extra

LONGEST_SIDE = 1288  #: Longest side of a page's image in pixels, as in olmOCR since version 0.2
_LEFT_OUT = ("pdf", "page", "url", "checked")


def render_page(path: Path, page: int) -> bytes | None:
    """Return a page of a PDF file, from 1 on, as a PNG image; None if there is no such page."""
    pdfium = import_extra("pypdfium2")
    try:
        with pdfium.PdfDocument(path) as document:
            if not 0 < page <= len(document):
                return None
            rendered = document[page - 1]
            scale = LONGEST_SIDE / max(rendered.get_size())
            buffer = io.BytesIO()
            rendered.render(scale=scale).to_pil().convert("RGB").save(buffer, "PNG")
            return buffer.getvalue()
    except FileNotFoundError:
        return None
    except pdfium.PdfiumError as error:
        raise UserError(f"{path} cannot be rendered: {error}") from error


@converter(tasks=("document",), splits={"test": {"olmOCR-Bench": 1_403}, "train": None})
def convert(request: Request) -> Rows:
    """Yield one row per page; the category of a test is the name of its file. Tests of other types,
    format and footnote, which the benchmark does not have, are left out."""
    pages: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for file in request.list_files("*.jsonl"):
        for row in read_json_rows(file):
            test = {k: v for k, v in row.items() if k not in _LEFT_OUT and v is not None}
            tests = pages.setdefault((row["pdf"], row["page"]), [])
            if row["type"] in TYPES:
                tests.append(test | {"category": file.stem})
    has_baseline = {
        pdf for (pdf, _), tests in pages.items() for t in tests if t["type"] == "baseline"
    }
    for pdf in dict.fromkeys(pdf for pdf, _ in pages):
        if pdf not in has_baseline:
            first = pages.setdefault((pdf, 1), [])
            first.append({"type": "baseline", "category": "baseline"})
    for (pdf, page), tests in pages.items():
        name = f"{pdf}-{page}"
        if not tests:
            yield RefusedRow(name, "it has no test of the benchmark's types", kind="excluded")
            continue
        image = render_page(request.path / "pdfs" / pdf, page)
        meta = {"category": tests[0]["category"]}
        yield ConvertedRow(name, (image,), "Read this page.", {"tests": tests}, meta)
