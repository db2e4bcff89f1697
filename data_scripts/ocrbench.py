"""OCRBench v1: 1,000 questions, from OCRBench.json with images or the table echo840/OCRBench.

--source: OCRBench.json, hf:echo840/OCRBench, or a folder with its parquet files.
--images: OCRBench_Images; for the table, a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import list_texts, read_rows

_FIELDS = ("answers", "dataset_name", "type")
_COLUMNS = ("answer", "dataset", "question_type")


@converter(tasks=("ocr",), splits={"test": 1_000})
def convert(request: Request) -> Rows:
    """Yield one row per question; a single answer becomes a list of one."""
    rows = read_rows(request, ("question", *_COLUMNS), lambda row: row["image_path"])
    for number, (row, image) in enumerate(rows):
        is_table = "dataset" in row
        answers, dataset, kind = (row[name] for name in (_COLUMNS if is_table else _FIELDS))
        # The file counts ids within each dataset.
        name = str(number) if is_table else f"{dataset}-{row['id']}"
        meta = {"dataset_name": dataset, "type": kind}
        texts = list_texts(answers)
        yield ConvertedRow(f"ocrbench-{name}", (image,), row["question"], texts, meta)
