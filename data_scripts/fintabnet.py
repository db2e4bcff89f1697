"""FinTabNet: images of tables from annual reports, with their HTML.

Any dataset of docling-project with the columns image, html and cells is read: FinTabNet_OTSL,
PubTabNet_OTSL, PubTables-1M_OTSL, SynthTabNet_OTSL.

--source: hf:docling-project/FinTabNet_OTSL, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from itertools import chain

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.pubtabnet import build_row


@converter(tasks=("table",), splits={"test": None, "val": None, "train": None})
def convert(request: Request) -> Rows:
    """Yield one row per table; meta.type is complex if a cell has a span."""
    rows = request.read_table("image", "html", "cells")
    for number, row in enumerate(rows):
        cells = [*chain.from_iterable(row["cells"])]  # lists of cells
        image = row["image"]
        yield build_row(f"{request.split}-{number}", image, row["html"], cells)
