"""Object detection in COCO's JSON format: COCO, ODinW's parts, Roboflow exports.

Every question names all categories of the file, including those absent from the image, as COCO AP
requires. Crowd regions are left out of the answer (meta.crowds counts them).

--source: the annotation file, or a folder with instances_SPLIT*.json or _annotations.coco.json.
--images: the folder of its images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import find_file, read_coco, xywh_to_xyxy


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per image, including images without objects."""
    patterns = (f"**/instances_{request.split}*.json", f"{request.split}/_annotations.coco.json")
    coco = read_coco(find_file(request.source, *patterns))
    question = ", ".join(coco.categories.values())
    for image, regions in coco.group_by_image().items():
        objects = [a for a in regions if not a.get("iscrowd")]
        yield ConvertedRow(
            id=f"{request.split}-{image}",
            images=(coco.images[image]["file_name"],),
            question=question,
            answer={
                "boxes": [xywh_to_xyxy(a["bbox"]) for a in objects],
                "labels": [coco.categories[a["category_id"]] for a in objects],
            },
            meta={"image_id": image, "crowds": len(regions) - len(objects)},
        )


CONVERTER = Converter(
    __doc__ or "", read, tasks=("detection",), splits=("val", "valid", "test", "train")
)

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
