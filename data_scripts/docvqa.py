"""DocVQA and InfographicVQA in the Robust Reading Competition's format, and lmms-lab's table.

--source: val_v1.0_withQT.json or infographicsVQA_val_v1.0_withQT.json, hf:lmms-lab/DocVQA with
its configuration (hf:lmms-lab/DocVQA:validation:DocVQA), or a folder with its parquet files. The
test split has no answers.
--images: the folder that the file's image paths (documents/…) are relative to; for infographics,
the folder that holds the images; for the table, a folder to write them into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import RawRecord, get_image_bytes, read_json, read_table

_COLUMNS = ("questionId", "question", "answers", "image")
_TABLE_SPLITS = {"val": "validation"}


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per question; questions without answers are refused."""
    if request.source.endswith(".json"):
        for row in read_json(request.path)["data"]:
            # DocVQA names the field image, InfographicVQA image_local_name.
            yield _convert_row(row, row.get("image_local_name", row.get("image")))
    else:
        split = _TABLE_SPLITS.get(request.split, request.split)
        for row in read_table(request.source, split, _COLUMNS):
            yield _convert_row(row, get_image_bytes(row["image"]))


def _convert_row(row: RawRecord, image: str | bytes | None) -> ConvertedRow | RefusedRow:
    name = str(row["questionId"])
    answers = [answer for answer in row.get("answers") or [] if answer.strip()]
    if not answers:
        return RefusedRow(name, "it has no answers")
    kinds = row.get("question_types", row.get("answer_type"))
    meta = {"type": "/".join(kinds) if kinds else None, "document": row.get("docId")}
    return ConvertedRow(name, (image,), row["question"], answers, meta)


_SPLITS = {
    "val": {"DocVQA": 5_349, "InfographicVQA": 2_801},
    "train": {"DocVQA": 39_463, "InfographicVQA": 23_946},
}
CONVERTER = Converter(__doc__ or "", read, tasks=("ocr",), splits=_SPLITS)

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
