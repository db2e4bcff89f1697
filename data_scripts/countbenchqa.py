"""CountBenchQA: 491 questions with counts from 2 to 10.

Copies differ in how many images their links still gave, so say n beside a score.

--source: hf:vikhyatk/CountBenchQA, or a folder with its parquet files.
--images: a folder that the images are written into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.conversion import Converter, Found, Refused, Request
from vlm_grpo.data_scripts.sources import image_bytes, read_table


def read(request: Request) -> Iterator[Found | Refused]:
    """One row for each question; those whose image is gone are refused."""
    columns = ("image", "question", "number")
    for number, row in enumerate(read_table(request.source, request.split, columns)):
        image = image_bytes(row["image"])
        yield Found(f"countbenchqa-{number}", (image,), row["question"], row["number"])


CONVERTER = Converter(__doc__ or "", read, tasks=("counting",), splits=("test",))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
