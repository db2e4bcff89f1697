"""OS-Atlas's grounding data: elements of screens of phones, desktops and web pages.

Boxes are fractions of the image's sides, left, top, right, bottom. Elements without an area are
left out. Instructions are names of elements from accessibility trees and HTML.

--source: one of its .json files, such as windows_splited.json or seeclick_web.json.
--images: the folder that the file's image names are relative to.
"""

from vlm_grpo.config.data import PILLOW_WARNS_AT
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json_rows


@converter(tasks=("gui", "grounding"), splits={"train": None})
def convert(request: Request) -> Rows:
    """Yield one row per element; a row of the file has one, or a list of elements."""
    reader = MediaReader(request.images, PILLOW_WARNS_AT)
    for number, row in enumerate(read_json_rows(request.find_file()), start=1):
        image, elements = row["img_filename"], row.get("elements", [row])
        try:
            width, height = reader.read(image, image).size
        except ValueError as error:
            for index in range(len(elements)):
                yield RefusedRow(f"{number}-{index}", "its image cannot be used", str(error))
            continue
        for index, element in enumerate(elements):
            x1, y1, x2, y2 = element["bbox"]
            name, box = f"{number}-{index}", [x1 * width, y1 * height, x2 * width, y2 * height]
            if not (x1 < x2 and y1 < y2):
                yield RefusedRow(name, "its box has no area", str(box), kind="excluded")
                continue
            meta = {"ui_type": element["data_type"]} if "data_type" in element else {}
            question = element["instruction"]
            yield ConvertedRow(name, (image,), question, {"boxes": [box]}, meta)
