"""TallyQA: counting questions, simple and complex, about COCO and Visual Genome images.

--source: train.json or test.json, or the folder that holds both.
--images: the folder that the rows' image paths (train2014/…, VG_100K/…) are relative to.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json


@converter(tasks=("counting",), splits={"test": 38_589, "train": 249_318})
def convert(request: Request) -> Rows:
    """Yield one row per question; meta.kind is simple, complex or unknown."""
    for row in read_json(request.find_file(f"{request.split}.json")):
        simple = row.get("issimple")
        kind = "unknown" if simple is None else "simple" if simple else "complex"
        yield ConvertedRow(
            id=f"{request.split}-{row['image_id']}-{row['question_id']}",
            images=(row["image"],),
            question=row["question"],
            answer=int(row["answer"]),
            meta={"kind": kind, "data_source": row.get("data_source")},
        )
