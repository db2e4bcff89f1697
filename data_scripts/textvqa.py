"""TextVQA 0.5.1: questions about text in photographs, with ten answers each.

--source: TextVQA_0.5.1_val.json, the folder that holds it, hf:lmms-lab/textvqa, or a folder with
its parquet files. The test split has no answers.
--images: train_images, which holds train and val; for the table, a folder to write them into.
"""

from dataclasses import replace

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import accept_texts, read_data, read_rows

_COLUMNS = ("question_id", "image_id", "question", "answers")


@converter(tasks=("ocr",), splits={"val": 5_000, "train": 34_602})
def convert(request: Request) -> Rows:
    """Yield one row per question with all ten answers, which VQA accuracy needs."""
    if any(request.path.glob("TextVQA_*.json")):
        path = request.find_file(f"TextVQA_*_{request.split}.json")
        request = replace(request, source=str(path))
    rows = read_rows(request, _COLUMNS, lambda row: f"{row['image_id']}.jpg", read_data)
    for row, image in rows:
        # An empty answer is not a valid gold answer. meta.answers still counts it for the accuracy.
        meta = {"image_id": row["image_id"], "answers": len(row.get("answers") or [])}
        yield accept_texts(str(row["question_id"]), image, row, meta)
