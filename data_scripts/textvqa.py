"""TextVQA 0.5.1: questions about text in photographs, with ten answers each.

--source: TextVQA_0.5.1_val.json, the folder that holds it, hf:lmms-lab/textvqa, or a folder with
its parquet files. The test split has no answers.
--images: train_images, which holds train and val; for the table, a folder to write them into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import (
    RawRecord,
    find_file,
    get_image_bytes,
    read_json,
    read_table,
)

_COLUMNS = ("question_id", "image_id", "question", "answers", "image")
_TABLE_SPLITS = {"val": "validation"}


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per question with all ten answers, which VQA accuracy needs."""
    folder = request.path
    if folder.suffix == ".json" or any(folder.glob("TextVQA_*.json")):
        path = find_file(request.source, f"TextVQA_*_{request.split}.json")
        for row in read_json(path)["data"]:
            yield _convert_row(row, f"{row['image_id']}.jpg")
    else:
        split = _TABLE_SPLITS.get(request.split, request.split)
        for row in read_table(request.source, split, _COLUMNS):
            yield _convert_row(row, get_image_bytes(row["image"]))


def _convert_row(row: RawRecord, image: str | bytes | None) -> ConvertedRow | RefusedRow:
    name = str(row["question_id"])
    # An empty answer is not a valid gold answer. meta.answers still counts it for the VQA accuracy.
    answers = [answer for answer in row.get("answers") or [] if answer.strip()]
    if not answers:
        return RefusedRow(name, "it has no answers")
    meta = {"image_id": row["image_id"], "answers": len(row["answers"])}
    return ConvertedRow(name, (image,), row["question"], answers, meta)


_SPLITS = {"val": 5_000, "train": 34_602}
CONVERTER = Converter(__doc__ or "", read, tasks=("ocr",), splits=_SPLITS)

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
