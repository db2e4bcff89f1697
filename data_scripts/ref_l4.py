"""Ref-L4: 45,341 long referring expressions; the official accuracy counts IoU > 0.5, not ≥.

--source: the folder with ref-l4-val.parquet and ref-l4-test.parquet, or one of them.
--images: the folder that images.tar.gz was unpacked into.
"""

from dataclasses import replace

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import locate_phrase, xywh_to_xyxy

_COLUMNS = ("id", "caption", "bbox", "file_name")


@converter(tasks=("grounding",), splits={"all": 45_341, "val": None, "test": None})
def convert(request: Request) -> Rows:
    """Yield one row per expression; published numbers are for val and test together."""
    parts = ("val", "test") if request.split == "all" else (request.split,)
    for part in parts:
        path = request.find_file(f"ref-l4-{part}.parquet")
        for row in replace(request, source=str(path), split=part).read_table(*_COLUMNS):
            name, box = f"{part}-{row['id']}", xywh_to_xyxy(row["bbox"])
            meta = {"split": part, "category": row.get("ori_category_id")}
            yield locate_phrase(name, row["file_name"], row["caption"], box, meta)
