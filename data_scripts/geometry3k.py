"""Geometry3K without choices: geometry problems with a figure, in the form that EasyR1 uses.

--source: hf:hiyouga/geometry3k, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import pose_problem


@converter(tasks=("math",), splits={"test": 601, "validation": 300, "train": 2_101})
def convert(request: Request) -> Rows:
    table = request.read_table("images", "problem", "answer")
    for number, row in enumerate(table):
        name = f"{request.split}-{number}"
        yield pose_problem(name, row["images"], row["problem"], row["answer"], {})
