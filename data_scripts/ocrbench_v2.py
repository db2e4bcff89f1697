"""OCRBench v2: the questions with short answers; the other types are left out and counted.

Tables, charts, documents, key information, spotting, grounding, full pages and translation need
special metrics (tree edit distance, BLEU, …). The mean over the remaining categories is therefore
not an OCRBench v2 score, but each category's score is comparable.

--source: OCRBench_v2.json, hf:ling99/OCRBench_v2, or a folder with its parquet files.
--images: the folder that its image_path fields are relative to; for the table, a folder to write
the images into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.benchmarks.metrics import OCRBENCH_V2
from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import RawRecord, get_image_bytes, read_json, read_table


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per question of a type that ``benchmarks.metrics`` can score."""
    if request.source.endswith(".json"):
        for row in read_json(request.path):
            yield _convert_row(row, row["image_path"])
    else:
        columns = ("id", "dataset_name", "question", "type", "answers", "image")
        for row in read_table(request.source, request.split, columns):
            yield _convert_row(row, get_image_bytes(row["image"]))


def _convert_row(row: RawRecord, image: str | bytes | None) -> ConvertedRow | RefusedRow:
    name, kind = f"ocrbench-v2-{row['id']}", row["type"]
    if kind not in OCRBENCH_V2:
        reason = f"type {kind} needs a metric that is not supported"
        return RefusedRow(name, reason, kind="excluded")
    answers = row["answers"] if isinstance(row["answers"], list) else [row["answers"]]
    rule = row.get("eval")
    return ConvertedRow(
        id=name,
        images=(image,),
        question=row["question"],
        answer=[str(answer) for answer in answers],
        meta={
            "dataset_name": row["dataset_name"],
            "type": kind,
            "category": OCRBENCH_V2[kind],
            "eval": None if rule in ("", "None") else rule,
        },
    )


CONVERTER = Converter(__doc__ or "", read, tasks=("ocr",), splits={"test": 10_000})

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
