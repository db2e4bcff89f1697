"""Geometry3K without choices: geometry problems with a figure, in the form that EasyR1 uses.

--source: hf:hiyouga/geometry3k, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from __future__ import annotations

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import get_image_bytes, read_table
from vlm_grpo.data_scripts.rows import pose_problem


@converter(tasks=("math",), splits={"test": 601, "validation": 300, "train": 2_101})
def convert(request: Request) -> Rows:
    """Yield one row per problem."""
    table = read_table(request.source, request.split, ("images", "problem", "answer"))
    for number, row in enumerate(table):
        images = [get_image_bytes(image) for image in row["images"]]
        name = f"{request.split}-{number}"
        yield pose_problem(name, images, row["problem"], row["answer"], {})


if __name__ == "__main__":
    raise SystemExit(convert.main())
