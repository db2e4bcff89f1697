"""Visual Genome: region descriptions as grounding phrases. It has no official splits.

Many of its boxes extend beyond their image: without --allow-partial, nothing is written.

--source: region_descriptions.json, or its folder. --images: the folder with VG_100K and VG_100K_2.
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import locate_phrase, read_json, xywh_to_xyxy

_FOLDERS = ("VG_100K", "VG_100K_2")


@converter(tasks=("grounding",), splits={"train": 5_408_689})
def convert(request: Request) -> Rows:
    for entry in read_json(request.find_file("region_descriptions.json")):
        paths = [f"{folder}/{entry['id']}.jpg" for folder in _FOLDERS]
        image = next((path for path in paths if (request.images / path).is_file()), paths[0])
        for region in entry["regions"]:
            box = xywh_to_xyxy([region[side] for side in ("x", "y", "width", "height")])
            name, phrase = f"{request.split}-{region['region_id']}", region["phrase"].strip()
            yield locate_phrase(name, image, phrase, box, {"image_id": entry["id"]})
