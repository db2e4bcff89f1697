"""OCRBench v2: the questions with short answers; the other types are left out and counted.

Tables, charts, documents, key information, spotting, grounding, full pages and translation need
special metrics (tree edit distance, BLEU, …). The mean over the remaining categories is therefore
not an OCRBench v2 score, but each category's score is comparable.

--source: OCRBench_v2.json, hf:ling99/OCRBench_v2, or a folder with its parquet files.
--images: the folder that its image_path fields are relative to; for the table, a folder to write
the images into.
"""

from vlm_grpo.benchmarks.metrics import OCRBENCH_V2
from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import list_texts, read_rows

_COLUMNS = ("id", "dataset_name", "question", "type", "answers")


@converter(tasks=("ocr",), splits={"test": 10_000})
def convert(request: Request) -> Rows:
    """Yield one row per question of a type that ``benchmarks.metrics`` can score."""
    for row, image in read_rows(request, _COLUMNS, lambda row: row["image_path"]):
        name, kind, rule = f"ocrbench-v2-{row['id']}", row["type"], row.get("eval")
        if kind not in OCRBENCH_V2:
            reason = f"type {kind} needs a metric that is not supported"
            yield RefusedRow(name, reason, kind="excluded")
            continue
        meta = {
            "dataset_name": row["dataset_name"],
            "type": kind,
            "category": OCRBENCH_V2[kind],
            "eval": None if rule in ("", "None") else rule,
        }
        yield ConvertedRow(name, (image,), row["question"], list_texts(row["answers"]), meta)
