"""OCRBench v1: 1,000 questions, from OCRBench.json with images or the table echo840/OCRBench.

--source: OCRBench.json, hf:echo840/OCRBench, or a folder with its parquet files.
--images: OCRBench_Images; for the table, a folder to write the images into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import RawRecord, get_image_bytes, read_json, read_table


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per question; a single answer becomes a list of one."""
    if request.source.endswith(".json"):
        names = ("answers", "dataset_name", "type")
        for row in read_json(request.path):
            # The file counts ids within each dataset.
            yield _convert_row(row, f"{row['dataset_name']}-{row['id']}", row["image_path"], names)
    else:
        names = ("answer", "dataset", "question_type")
        columns = ("question", "image", *names)
        for number, row in enumerate(read_table(request.source, request.split, columns)):
            yield _convert_row(row, str(number), get_image_bytes(row["image"]), names)


def _convert_row(
    row: RawRecord, name: str, image: str | bytes | None, names: Sequence[str]
) -> ConvertedRow:
    answers, dataset, kind = (row[name] for name in names)
    accepted = answers if isinstance(answers, list) else [answers]
    return ConvertedRow(
        id=f"ocrbench-{name}",
        images=(image,),
        question=row["question"],
        answer=[str(answer) for answer in accepted],
        meta={"dataset_name": dataset, "type": kind},
    )


CONVERTER = Converter(__doc__ or "", read, tasks=("ocr",), splits={"test": 1_000})

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
