"""ScreenSpot, ScreenSpot-v2 and ScreenSpot-Pro: one box of an element per instruction.

The boxes of the first two are x, y, width, height, those of ScreenSpot-Pro x1, y1, x2, y2.

--source: the folder with screenspot_mobile.json, screenspot_desktop.json and screenspot_web.json,
  with the same names ending in _v2, or with ScreenSpot-Pro's annotations.
--images: screenspot_imgs, screenspotv2_image, or ScreenSpot-Pro's images.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json_rows, xywh_to_xyxy

_COUNTS = {"ScreenSpot and ScreenSpot-v2": 1_272, "ScreenSpot-Pro": 1_581}
_META = ("platform", "application", "group", "ui_type")


@converter(tasks=("gui", "grounding"), splits={"test": _COUNTS})
def convert(request: Request) -> Rows:
    """Yield one row per instruction, of all files of the folder."""
    for file in request.list_files("*.json"):
        for number, row in enumerate(read_json_rows(file)):
            if "ui_type" in row:
                name, box = row["id"], row["bbox"]
                meta = {key: row[key] for key in _META}
            else:
                name, box = f"{file.stem}-{number}", xywh_to_xyxy(row["bbox"])
                platform = file.stem.removeprefix("screenspot_").removesuffix("_v2")
                meta = {"platform": platform, "ui_type": row["data_type"]}
                meta["source"] = row["data_source"]
            question, image = row["instruction"], row["img_filename"]
            yield ConvertedRow(name, (image,), question, {"boxes": [box]}, meta)
