"""OVDEval: open-vocabulary detection in nine parts, each a COCO file of its own.

Where an image lists its own labels (text and neg_text), it is asked for those; the parts celebrity,
landmark and logo list none, and are asked for all their categories. Its score is NMS-AP.

--source: one part's file, as color.json. --images: the folder of that part's images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import find_file, read_coco, xywh_to_xyxy


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each image, asked for what is there and for what is not."""
    path = find_file(request.source)
    coco = read_coco(path)
    for number, regions in coco.group_by_image().items():
        image = coco.images[number]
        asked = image.get("text", []) + image.get("neg_text", [])
        yield ConvertedRow(
            id=f"{path.stem}-{number}",
            images=(image["file_name"],),
            question=", ".join(asked or coco.categories.values()),
            answer={
                "boxes": [xywh_to_xyxy(region["bbox"]) for region in regions],
                "labels": [coco.categories[region["category_id"]] for region in regions],
            },
            meta={"part": path.stem, "image_id": number},
        )


CONVERTER = Converter(__doc__ or "", read, tasks=("detection",), splits=("test",))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
