"""DocVQA and InfographicVQA in the Robust Reading Competition's format, and lmms-lab's table.

--source: val_v1.0_withQT.json or infographicsVQA_val_v1.0_withQT.json, hf:lmms-lab/DocVQA with
its configuration (hf:lmms-lab/DocVQA:validation:DocVQA), or a folder with its parquet files. The
test split has no answers.
--images: the folder that the file's image paths (documents/…) are relative to; for infographics,
the folder that holds the images; for the table, a folder to write them into.
"""

from vlm_grpo.data_scripts.converter import RawRecord, Request, Rows, converter
from vlm_grpo.data_scripts.readers import accept_texts, read_data, read_rows

_COLUMNS = ("questionId", "question", "answers")

_SPLITS = {
    "val": {"DocVQA": 5_349, "InfographicVQA": 2_801},
    "train": {"DocVQA": 39_463, "InfographicVQA": 23_946},
}


def _locate(row: RawRecord) -> str | None:
    """Return the image's path, under the name that DocVQA or that InfographicVQA gives it."""
    return row.get("image_local_name", row.get("image"))


@converter(tasks=("ocr",), splits=_SPLITS)
def convert(request: Request) -> Rows:
    """Yield one row per question; questions without answers are refused."""
    for row, image in read_rows(request, _COLUMNS, _locate, read_data):
        kinds = row.get("question_types", row.get("answer_type"))
        meta = {"type": "/".join(kinds) if kinds else None, "document": row.get("docId")}
        yield accept_texts(str(row["questionId"]), image, row, meta)
