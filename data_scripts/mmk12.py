"""MMK12, the training data of MM-Eureka: school problems with a figure.

--source: hf:FanqingM/MMK12, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import pose_problem


@converter(tasks=("math",), splits={"train": 15_616, "test": 2_000})
def convert(request: Request) -> Rows:
    for row in request.read_table("id", "question", "answer", "subject", "image"):
        images, meta = [row["image"]], {"subject": row["subject"]}
        yield pose_problem(str(row["id"]), images, row["question"], row["answer"], meta)
