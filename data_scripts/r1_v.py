"""R1-V's files for counting: its test .jsonl and its training table.

The test file (Super-CLEVR-200) has image_path, question and ground_truth; the training table
(CLEVR-70k) image, problem and a solution in <answer> tags. Rows without a whole number as their
answer (R1-V's geometry) are refused.

--source: the .jsonl file, hf:leonardPKU/clevr_cogen_a_train, or a folder with its parquet files.
--images: the folder that holds the test images by name, or that the table's are written into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from vlm_grpo.data.rows import get_answer_candidates
from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import get_image_bytes, read_json_rows, read_table


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each question."""
    if request.source.endswith((".jsonl", ".json")):
        rows = (
            (row["question"], row["ground_truth"], PurePosixPath(row["image_path"]).name)
            for row in read_json_rows(request.path)
        )
    else:
        columns = ("image", "problem", "solution")
        rows = (
            (row["problem"], row["solution"], get_image_bytes(row["image"]))
            for row in read_table(request.source, request.split, columns)
        )
    for number, (question, solution, image) in enumerate(rows, start=1):
        name = f"{request.split}-{number}"
        counts = [a for a in get_answer_candidates(solution) if isinstance(a, int)]
        if not counts:
            yield RefusedRow(name, "its answer is no whole number", f"{solution!r:.80}")
            continue
        yield ConvertedRow(name, (image,), question, counts[0])


CONVERTER = Converter(__doc__ or "", read, tasks=("counting",), splits=("test", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
