"""CV-Bench (Cambrian-1): 2,638 questions with two to six options about objects in 2D and 3D.

--source: hf:nyu-visionx/CV-Bench, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import to_choice

_META = ("type", "task", "source")


@converter(
    tasks=("choice",), splits={"test": {"CV-Bench": 2_638, "its 2D": 1_438, "its 3D": 1_200}}
)
def convert(request: Request) -> Rows:
    for row in request.read_table("idx", "image", "question", "choices", "answer", *_META):
        name, image = f"cv-bench-{row['type']}-{row['idx']}", row["image"]
        answer = to_choice(row["choices"], row["answer"])
        yield ConvertedRow(
            name, (image,), row["question"], answer, {key: row[key] for key in _META}
        )
