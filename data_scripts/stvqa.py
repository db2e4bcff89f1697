"""ST-VQA (Scene Text VQA) in the Robust Reading Competition's format.

--source: train_task_3.json. The test answers are not public, so papers hold out a part of train:
--limit and --seed sample one. --images: the folder that its file_path fields are relative to.
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import accept_texts, read_json


@converter(tasks=("ocr",), splits={"train": None})
def convert(request: Request) -> Rows:
    """Yield one row per question; questions without answers are refused."""
    for row in read_json(request.find_file(f"{request.split}_task_3.json"))["data"]:
        meta = {"dataset": row.get("dataset")}
        yield accept_texts(str(row["question_id"]), row["file_path"], row, meta)
