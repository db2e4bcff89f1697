"""VisionReasoner's training data: questions about images of 840 × 840 with boxes and points.

A row's solution is a JSON list of objects, each with bbox_2d and point_2d in pixels of its image.

--source: hf:Ricky06662/VisionReasoner_multi_object_7k_840, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import parse_json


@converter(tasks=("segmentation",), splits={"train": None})
def convert(request: Request) -> Rows:
    for number, row in enumerate(request.read_table("problem", "solution", "image")):
        name = f"{request.split}-{number}"
        objects = parse_json(row["solution"], request.path)
        if not all({"bbox_2d", "point_2d"} <= found.keys() for found in objects):
            yield RefusedRow(name, "an object has no box or no point", row["solution"][:80])
            continue
        answer = {
            "boxes": [found["bbox_2d"] for found in objects],
            "points": [found["point_2d"] for found in objects],
        }
        yield ConvertedRow(name, (row["image"],), row["problem"], answer)
