"""MMK12, the training data of MM-Eureka: school problems with a figure.

--source: hf:FanqingM/MMK12, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from __future__ import annotations

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import get_image_bytes, read_table
from vlm_grpo.data_scripts.rows import pose_problem


@converter(tasks=("math",), splits={"train": 15_616, "test": 2_000})
def convert(request: Request) -> Rows:
    """Yield one row per problem."""
    columns = ("id", "question", "answer", "subject", "image")
    for row in read_table(request.source, request.split, columns):
        images, meta = [get_image_bytes(row["image"])], {"subject": row["subject"]}
        yield pose_problem(str(row["id"]), images, row["question"], row["answer"], meta)


if __name__ == "__main__":
    raise SystemExit(convert.main())
